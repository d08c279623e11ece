"""A session that does what each test wrote down, and the loop on a stdin and a stdout of memory."""

import io

import numpy as np

import serveloop
from serveloop import Answers, Loop
from verbs import Done, PromptProgress, Resume, Reused, Token
from verbs import SessionDone as Outcome

PATIENCE_S = 30  # for events that come at once; only a broken loop waits so long


def done_event(generated, n_prompt, finish):
    return Done(generated, n_prompt, 12.345, 6.78, finish, 3, 4, 1, 5, 6, 7, 8, 9.25, n_prompt - 1, 0)


def echo(request, stopped):
    """Answers a request with the start of its prompt."""
    n_prompt = len(request.prompt)
    yield Resume(1)
    yield PromptProgress(n_prompt, n_prompt, 12.345, 1234.56)
    yield Reused(1)
    sent = 0
    for token in request.prompt[: request.max_new]:
        if stopped():
            yield done_event(sent, n_prompt, "cancel")
            return
        yield Token(int(token))
        sent += 1
    yield done_event(sent, n_prompt, "length")


def copy_blocks(path, progress, phase):
    phase("capture", 4 << 20)
    for done_bytes in (0, 16 << 20, 20_000_000):
        progress(done_bytes, 20_000_000)
    phase("publish", 20_000_000)
    return Outcome(42, 20_000_000, 1234.5678)


class ScriptedSession:
    """The methods of engine.Session; what they do is given as functions, what came in is in `calls`."""

    def __init__(self, generate=echo, transfer=copy_blocks, stats=lambda: {"held_tokens": 3}):
        self._generate, self._transfer, self._stats = generate, transfer, stats
        self.calls, self.closed, self.stored = [], False, None

    def generate(self, request, stopped):
        self.calls.append(("GEN", request))
        return self._generate(request, stopped)

    def save(self, path, *, progress=None, phase=None):
        self.calls.append(("SAVE", path))
        return self._transfer(path, progress, phase)

    def autosave(self, path, *, progress=None, phase=None):
        self.calls.append(("AUTOSAVE", path))
        return self._transfer(path, progress, phase)

    def restore(self, path, *, progress=None, phase=None):
        self.calls.append(("RESTORE", path))
        return self._transfer(path, progress, phase)

    def stats(self):
        self.calls.append(("STATS",))
        return self._stats()

    def erase(self):
        self.calls.append(("ERASE",))
        return 17

    n_tokens = 5

    def info(self):
        return {"context": "4096", "model": "a  b\n=x\x1b[2J\u2028ü.gguf", "engine": "1.2.3"}

    def held_ids(self):
        return np.array([7, 8, 9], np.int32)

    def keep(self, n_answer):
        self.calls.append(("KEEP", n_answer))

    def rest(self, interrupted):
        self.settled_early = interrupted()

    def warm_up(self) -> None:
        self.calls.append(("warm up",))

    def close(self):
        self.closed = True


class Chunks:
    """A stdin that gives these chunks, one a read; a function among them is called before the read goes on.

    By then every chunk before it has been taken in, which makes the order of events between the threads certain.
    """

    def __init__(self, *steps):
        self._steps = list(steps)

    def read(self, _size):
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, bytes):
                return step
            step()
        return b""


class Lines(io.RawIOBase):
    """A stdout that keeps its lines and calls `on_line` with each of them."""

    def __init__(self, on_line=lambda line: None):
        self.written, self._on_line, self.flushed = b"", on_line, True

    def write(self, data):
        self.written += bytes(data)
        self.flushed = False
        self._on_line(bytes(data))
        return len(data)

    def flush(self):
        self.flushed = True

    def readable(self):
        return False


def talk(stdin, session=None, on_line=lambda line: None, **options):
    """The exit code, the answer lines and the log of one run of the loop."""
    stdout, log = Lines(on_line), []
    stdin = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
    code = Loop(session or ScriptedSession(), stdin, Answers(stdout), log.append, **options).run()
    assert stdout.flushed
    assert stdout.written.endswith(b"\n") or not stdout.written
    return code, stdout.written.decode().splitlines(), log


def waiter(event):
    """A step that waits for an event and fails the test where it does not come."""

    def wait():
        assert event.wait(PATIENCE_S)

    return wait


def until(event):
    """A request that sends one token and goes on when the event has come."""

    def generate(request, stopped):
        yield Token(1)
        waiter(event)()
        yield from echo(request, stopped)

    return generate


def finishes(lines):
    return [line.split()[5] for line in lines if line.startswith("DONE")]


class ScriptedEngine:
    max_context = 4096

    @classmethod
    def load(cls, options, log):
        print("a library's stray print")
        log(f"loading {options.model}")
        return cls()


class Options:
    model, slot_save_path = "m.gguf", None


def child():
    """What the processes below run: the loop on real stdin and stdout; a SAVE writes a file."""

    def write_file(path, progress, phase):
        with open(path, "wb") as file:
            file.write(b"x" * 1000)
        return Outcome(1, 1000, 0.25)

    serveloop.Engine, serveloop.Session = ScriptedEngine, lambda engine: ScriptedSession(transfer=write_file)
    return serveloop.serve_verbs(Options)
