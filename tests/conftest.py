"""What several test files need: a real model, where one was fetched, and a bound on memory."""

import os
import pathlib
import resource
import signal

import pytest

# Where these are set, pytest explains a failed comparison in full; of whole states, and for tests in which code that
# was broken on purpose has to fail them by the hundred, that takes hours.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)
# A shell starts background jobs with SIGINT ignored, and children inherit that; what is tested is an ordinary start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).resolve().parent.parent
REAL_MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def real_model() -> str:
    """The path of SmolLM2-135M-Instruct, from STRATA_TEST_MODEL or as `make model` fetches it."""
    path = pathlib.Path(os.environ.get("STRATA_TEST_MODEL") or REAL_MODEL)
    if not path.is_file():
        pytest.skip(f"no model at {path}: run `make model` or set STRATA_TEST_MODEL")
    return str(path)


HEADROOM_BYTES = 2 << 30  # address space that a broken file of some 100 KB may ask for, beyond what the process has


@pytest.fixture
def bounded_memory():
    """No more address space than HEADROOM_BYTES above what is in use."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets how many prompt tokens are read between two looks at STOP."""
    import generation

    return lambda n: monkeypatch.setattr(generation, "CHUNK", n)


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    """Kernels run on one thread and on two."""
    import cputeam as teams

    team = teams.Team(request.param)
    monkeypatch.setattr(teams, "ALONE", team)
    yield request.param
    team.close()
