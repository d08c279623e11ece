"""The work on texts, in a process that can be killed: bodies to prompts, texts to ids and back.

A template is a program that came with a file, and a text may be of any length: neither has a bound in time or memory of
its own. This process gives them one, and answers frames on stdin with frames on stdout: the length of a JSON object,
the object, and as many bytes behind it as its ``sizes`` say. Invariant: it never outlives the process at the other end.

Read next: ``httptexts.py``, the other end; ``httpchat.py``, which does the work; ``httpknown.py``.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import resource
import signal
import struct
import sys
import traceback
from array import array
from collections.abc import Callable, Iterable

import httpchat
from httpchat import GenerationRequest
from httpfields import ApiError, BadField, json_bytes, parse_object
from httpknown import KnownTexts, spell, unspell
from tokenizer import Prompt, Tokenizer, TokenizerError

LENGTH = struct.Struct("<I")
# Seconds of the processor's time for each step, far above what an honest request takes on a slow machine: a template
# writes megabytes in one second, and the ids of a megabyte of text are found in two.
BODY, TEMPLATE, IDS = "reading the body", "rendering the model's chat template", "finding the token ids"
LIMITS_S = {BODY: 10.0, TEMPLATE: 10.0, IDS: 60.0}
# What a job may take beside what the process has at its start: some for every job, some for each byte of its body.
JOB_MEMORY_BYTES = 256 << 20
MEMORY_A_BYTE = 16
# Garbage of small jobs is collected after so many of them, that of large ones at once.
JOBS_A_COLLECTION = 64
LARGE_BODY_BYTES = 1 << 20
READERS = {"chat": httpchat.read_chat, "completion": httpchat.read_completion}
PR_SET_PDEATHSIG = 1
FAULT_CHARACTERS = 1500  # of a traceback, from its end: what it says of the fault may be as long as a text


def frame(head: dict, blobs: Iterable[bytes] = ()) -> bytes:
    """A frame in bytes."""
    blobs = list(blobs)
    raw = json.dumps({"sizes": [len(blob) for blob in blobs]} | head).encode()
    return b"".join([LENGTH.pack(len(raw)), raw, *blobs])


def request_of(fields: dict, ids: bytes) -> GenerationRequest:
    """The request whose fields `generate` sent, and the ids of its prompt beside them."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(GenerationRequest)}
    fields = {name: kinds[name](value) if isinstance(value, list) else value for name, value in fields.items()}
    return GenerationRequest(**fields, ids=array("i", ids))


class WorkerTokenizer(Tokenizer):
    """A tokenizer that says what it begins, and gives known ids for text that was read or written before."""

    def __init__(self, metadata: dict[str, object], begin: Callable[[str], None]):
        super().__init__(metadata)
        self._begin = begin
        self.known = KnownTexts(functools.cache(self._bytes_of), self.may_cut)

    def _bytes_of(self, token_id: int) -> bytes | None:
        return None if self.is_control(token_id) else self.token_bytes(token_id)

    def render(self, messages: list[dict], variables: dict, **options) -> Prompt:
        """As the tokenizer does, at the time of the conversation that the messages go on with."""
        self._begin(TEMPLATE)
        prompt = super().render(messages, variables, **options)
        if not prompt.clock:
            return prompt
        earlier = self.known.earlier_clock(spell(prompt.pieces), prompt.clock)
        if not earlier:
            return prompt
        then = super().render(messages, variables, **options, clock=earlier)
        text = spell(then.pieces)
        return then if self.known.length_known(text) > first_answer(text, messages) else prompt

    def prompt_ids(self, pieces: Iterable[str | int], *, most: int | None = None) -> list[int]:
        """The ids that were read or written for the start of a prompt, and those of the rest."""
        self._begin(IDS)
        text = spell(pieces)
        ids, length = self.known.match(text)
        rest = self.encode_pieces(unspell(text[length:]), most=None if most is None else most - len(ids))
        return [*ids, *rest]

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """As the tokenizer does."""
        self._begin(IDS)
        return super().encode(text, special=special, bos=bos)


def first_answer(text: str, messages: list[dict]) -> int:
    """Where in a rendered text the first answer begins: a text that is known beyond it is no new conversation.

    Without an answer, the last character.
    """
    end = 0
    for message in messages:
        words = message["content"].strip() if isinstance(message.get("content"), str) else ""
        begin = text.find(words, end)
        if message.get("role") == "assistant" and begin >= 0:
            return begin
        end = max(end, begin + len(words))
    return len(text) - 1


class Worker:
    """Carries out one job after the other; ``send`` takes the frames."""

    def __init__(self, send: Callable[[bytes], object]):
        self._send = send
        self._phase = ""
        self._n_jobs = 0
        self._tokenizer: WorkerTokenizer | None = None
        self._memory_limits = resource.getrlimit(resource.RLIMIT_AS)
        self._limits_s: dict[str, float] = {}

    def carry_out(self, head: dict, blobs: list[bytes]) -> None:
        """One job; its answer is the last frame for it, but for one that nobody waits for."""
        if head["task"] == "learn":
            self._learn(array("i", blobs[0]), head["whole"])
            return
        body_bytes = sum(map(len, blobs))
        try:
            with self._limited(body_bytes):
                answer = getattr(self, head["task"])(head, *blobs)
            self._send(frame(*answer))
        except ApiError as error:
            self._refuse(error)
        except TokenizerError as error:
            self._refuse(ApiError(400, str(error)))
        except MemoryError:
            limit_mib = (JOB_MEMORY_BYTES + MEMORY_A_BYTE * body_bytes) >> 20
            self._send(frame({"phase": self._phase, "memory_mib": limit_mib}))
            sys.exit(1)
        except Exception:
            self._send(frame({"fault": traceback.format_exc()[-FAULT_CHARACTERS:]}))
        self._n_jobs += 1
        if body_bytes > LARGE_BODY_BYTES or self._n_jobs % JOBS_A_COLLECTION == 0:
            gc.collect()

    def _learn(self, ids: array, whole: bool) -> None:
        """Take the ids of a conversation; one that cannot be taken is read as any other text."""
        try:
            self._tokenizer.known.learn(ids, whole=whole)
        except Exception:
            traceback.print_exc()

    def _refuse(self, error: ApiError) -> None:
        self._send(frame({"refused": {"status": error.status, "body": error.body, "headers": error.headers}}))

    @contextlib.contextmanager
    def _limited(self, body_bytes: int):
        """A limit on memory; that on time begins with each step."""
        self._phase = ""
        if (mapped := _address_space_bytes()) and self._tokenizer:
            limit = mapped + JOB_MEMORY_BYTES + MEMORY_A_BYTE * body_bytes
            soft, hard = self._memory_limits
            limit = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, self._memory_limits)

    def begin(self, phase: str) -> None:
        """Begin a step: its time is over by SIGPROF, which ends the process in the middle of whatever it does."""
        if phase == self._phase:
            return
        signal.setitimer(signal.ITIMER_PROF, self._limits_s[phase])
        self._phase = phase
        self._send(frame({"phase": phase}))

    # Jobs. What they return is the answer.

    def start(self, head: dict, metadata: bytes) -> tuple[dict]:
        """Take the tokenizer of the model that the front has loaded, and the limits on the steps of a job."""
        self._limits_s = head["limits_s"]
        self._tokenizer = WorkerTokenizer(json.loads(metadata), self.begin)
        gc.disable()
        gc.freeze()
        return ({"done": {}},)

    def generate(self, head: dict, body: bytes) -> tuple[dict, list[bytes]]:
        """A body to a request, its GEN line and the ids of its prompt."""
        request = READERS[head["reader"]](self._body(body), self._tokenizer, head["n_ctx"])
        line = request.line(self._tokenizer.end_ids).encode()
        fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        ids = array("i", fields.pop("ids")).tobytes()
        fields = {name: list(value) if isinstance(value, frozenset) else value for name, value in fields.items()}
        return {"done": fields}, [line, ids]

    def apply_template(self, head: dict, body: bytes) -> tuple[dict, list[bytes]]:
        return _json({"prompt": httpchat.render_chat(self._body(body), self._tokenizer)})

    def tokenize(self, head: dict, body: bytes) -> tuple[dict, list[bytes]]:
        fields, tokenizer = self._body(body), self._tokenizer
        text = fields.get("content", "")
        if not isinstance(text, str):
            raise BadField("content", "expected a text")
        n_least = -(-len(text.encode(errors="replace")) // tokenizer.longest_token_bytes)
        if n_least > head["n_ctx"]:
            raise httpchat.exceeds_context(n_least, head["n_ctx"], at_least=True)
        special, bos = fields.get("parse_special", True) is True, fields.get("add_special", False) is True
        ids = tokenizer.encode(text, special=special, bos=bos)
        if fields.get("with_pieces") is True:
            return _json({"tokens": [{"id": one, "piece": tokenizer.decode([one])} for one in ids]})
        return _json({"tokens": ids})

    def detokenize(self, head: dict, body: bytes) -> tuple[dict, list[bytes]]:
        ids = httpchat.check_ids("tokens", self._body(body).get("tokens", []), self._tokenizer)
        self.begin(IDS)
        return _json({"content": self._tokenizer.decode(ids)})

    def _body(self, raw: bytes) -> dict:
        self.begin(BODY)
        return parse_object(raw)


def _json(content: dict) -> tuple[dict, list[bytes]]:
    """An answer that goes to the client as it is."""
    return {"done": {}}, [json_bytes(content)]


def _address_space_bytes() -> int:
    """What this process has mapped; 0 where the system does not tell, and sets no limit on it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _end_with_parent() -> None:
    """Where the system has it, leave at once with the front; elsewhere with the end of stdin, after the running job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)

    def send(raw: bytes) -> None:
        n_sent = 0
        while n_sent < len(raw):
            n_sent += sink.write(memoryview(raw)[n_sent:])

    worker = Worker(send)
    while head := source.read(LENGTH.size):
        fields = json.loads(source.read(LENGTH.unpack(head)[0]))
        worker.carry_out(fields, [source.read(size) for size in fields["sizes"]])


if __name__ == "__main__":
    main()
