"""Every test starts from nothing: no compiled code, and a compile cache of its own.

A test with several parameters runs for all combinations in ``make test-all``. In ``make test`` it
runs for as few as have each value of each parameter once; the others are marked ``matrix`` here.
"""

import pytest
import torch
import torch._dynamo

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path_factory, monkeypatch):
    """Forget compiled code, and give the test a private folder for the caches on disk.

    The caches ignore the aliasing of inputs, so one test's entry could answer another's.
    """
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv("CI", "1")  # where it is set, Inductor refuses more
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def compiler_threads():
    """Leave the cores to the test workers."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items):
    by_function = {}
    for item in items:
        if len(getattr(getattr(item, "callspec", None), "params", ())) > 1:
            by_function.setdefault(item.nodeid.split("[")[0], []).append(item)
    for group in by_function.values():
        rest = [item for item in group if not any(m.name == "matrix" for m in item.own_markers)]
        missing = set().union(*map(values_of, rest))
        while missing:
            # The last of those with most missing values, since the first values are the plainest.
            chosen = max(reversed(rest), key=lambda item: len(values_of(item) & missing))
            missing -= values_of(chosen)
            rest.remove(chosen)
        for item in rest:
            item.add_marker(pytest.mark.matrix)


def values_of(item):
    """Return the parameters of a test's run, each with its value's name."""
    params = item.callspec.params
    return {(name, str(getattr(value, "name", value))) for name, value in params.items()}
