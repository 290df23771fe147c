"""Every test starts from nothing: no compiled code, and a compile cache of its own."""

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
