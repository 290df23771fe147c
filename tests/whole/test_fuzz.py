"""A bounded slice of the random programs; `make fuzz` runs as many as one likes."""

import pytest

from tests.fuzz import CONFIGURATIONS, INDUCTOR_CONFIGURATIONS, run
from tests.support.matrix import in_matrix


@pytest.mark.parametrize("seed", in_matrix(range(3), but=[0]))
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_random_programs(configuration, seed):
    run(15, seed=seed, configurations=(configuration,))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_threads")
@pytest.mark.parametrize("configuration", INDUCTOR_CONFIGURATIONS)
def test_random_programs_on_inductor(configuration):
    run(60, seed=0, configurations=(configuration,))
