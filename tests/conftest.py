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


@pytest.fixture
def live(tmp_path):
    """A session that holds a conversation, a parked one and a good file of its own: session, next prompt, file."""
    from given_engine import new_session
    from given_session import talk

    session = new_session(conversation_cache_mib=100)
    talk(session, seed=50, n=12)
    prompt = talk(session)
    folder = tmp_path / "sessions"
    folder.mkdir()
    session.save(str(folder / "good.bin"))
    return session, prompt, folder / "good.bin"


@pytest.fixture
def refused(live):
    """A check that an operation of the live session is refused and that nothing came of it."""
    from given_session import refusing

    return refusing(live)


@pytest.fixture
def target(tmp_path):
    """Where an older file lies, alone in its folder."""
    from given_target import OLD

    path = tmp_path / "chat.bin"
    path.write_bytes(OLD)
    return path


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory):
    """A model file with a tokenizer and no weights, as the front reads it."""
    from given_front import write_tokenizer_model

    return write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def make_front(tokenizer_model, tmp_path):
    """Starts fronts that save below tmp_path and are stopped at the end."""
    from given_front import RunningFront

    fronts = []

    def make(**options):
        (tmp_path / "saved").mkdir(exist_ok=True)
        front = RunningFront(tmp_path, tokenizer_model, slot_save_path=str(tmp_path / "saved"), **options)
        fronts.append(front)
        return front

    yield make
    for front in fronts:
        front.stop()


@pytest.fixture
def front(make_front):
    return make_front()
