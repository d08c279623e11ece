"""The engine, which never changes once loaded, and the session: one mutable conversation.

It owns loading, identity and the timeline: what is held, resumed, generated, saved and restored. It knows no HTTP, no
text and no file bytes. Invariant: between requests the session holds either a complete conversation or none, and a
refused request, save or restore leaves it as it was. Read next: model.py (a pass), promptcache.py (what serves a
prompt), sessionstate.py (a conversation as a file).
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import backend
import controlvector
import resources
import sessionstate
from expertprofile import ExpertProfile
from fingerprint import Config, FingerprintError, Rope, config_fingerprint, model_fingerprint
from fingerprint import ModelFile as FingerprintedFile
from gguffile import GgufError, embedded_model
from jit import KERNELS
from kvcache import FORMATS, Cache, formats_for
from model import Model
from promptcache import Checkpoints, ParkingLot, is_prefix
from sampling import SamplingOptions, choose
from sessionfile import Identity, SessionError, SessionReader, save_peak_bytes, write_session
from weights import PAIRED_ROPE, ModelError, load_model

VERSION = "0.1.0"  # part of every saved file's identity: another version may compute other bits
DEFAULT_CONTEXT = 4096  # at most, where the user names none: its pools are allocated at start
CHUNK = 512  # prompt tokens read between two looks at STOP
MARGIN = 8  # cells kept free behind a request: the longest window of speculative decoding
DRAFT_FLOOR = 0.3  # a draft less probable than this is not worth its place in a window
LAST_STAMP = 2**64 - 1  # a file has room for no greater one, and may have come with it
SLOW_START_S = 5.0  # a start that takes longer has compiled kernels and says so
SAMPLE_BYTES = 2 << 20  # read of each model file for its fingerprint
MIB = 1 << 20
LEAST_RESIDENT = 20480  # cells on the device: what one chunk of a prompt selects must have room


class RequestError(Exception):
    """A request that is refused; nothing has changed."""


class FatalError(Exception):
    """A restore that failed after a pool was written, or a device that failed in a request; the process must end."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of `strata --serve` that reach the engine, named like the flags."""

    model: str | None = None
    slot_save_path: str | None = None
    max_context: int | None = None
    kv: str = "fp16"
    kv_resident: int = 0
    backend: str = "auto"
    prompt_cache: int = 6
    prompt_cache_every: int = 16384
    prompt_cache_root: int = 2048
    conversation_cache_mib: int = 0
    conversation_cache_slots: int = 4
    conversation_cache_min_free_mib: int = 2560
    session_min_free_mib: int = 4096
    spec: int | None = None
    threads: int | None = None
    control_vector: str | None = None
    activations: str = "int8"
    expert_cache_mib: int = 0
    expert_profile_save: str | None = None


class GenRequest(NamedTuple):
    """One generation: prompt int32 [T], the most tokens to emit, and what ends or steers it."""

    prompt: np.ndarray
    max_new: int
    sampling: SamplingOptions = SamplingOptions()
    stop: frozenset[int] = frozenset()
    checkpoint: bool = True  # False: nothing of this request is kept


class Resume(NamedTuple):
    n_reused: int


class PromptProgress(NamedTuple):
    position: int
    n_prompt: int
    ms: float
    tokens_per_s: float


class Reused(NamedTuple):
    n: int


class Token(NamedTuple):
    id: int


class Done(NamedTuple):
    """The result line of a request, fields in the order of the protocol."""

    generated: int
    n_prompt: int
    prompt_ms: float
    decode_ms: float
    finish: str  # stop, length or cancel
    drafts_accepted: int
    drafts_offered: int
    reused: int
    cache_hits: int
    cache_lookups: int
    ram_blobs: int
    file_blobs: int
    file_mb: float
    n_prompt_read: int
    experts_over_pcie: int


class Outcome(NamedTuple):
    """A finished save or restore."""

    n_tokens: int
    size_bytes: int
    ms: float


class Engine:
    """A loaded model with its backend and settings."""

    def __init__(self, options: EngineOptions, file, operations: tuple, log: Callable[[str], None]):
        config = file.config
        self.options, self.config, self.log = options, config, log
        self.backend, self.operations = operations
        self.model_paths, self.end_ids, self.turn_start_id = file.paths, file.end_ids, file.turn_start_id
        self.n_vocab = config.n_vocab
        self.max_context = options.max_context or min(config.n_ctx, DEFAULT_CONTEXT)
        if self.max_context > config.n_ctx:
            log(f"--max-context {self.max_context} is beyond the {config.n_ctx} tokens this model was made for")
        self.cell_format = _choose_format(options.kv, config.head_dim)
        self.spec = _choose_window(options.spec, config.n_draft, log)
        self.n_threads = _choose_threads(options.threads, log)
        directions, self.cvec_digest = _load_directions(options.control_vector, config)
        if self.backend == "cpu":
            self.operations, team = self.operations.operations(self.n_threads)
            weakref.finalize(self, team.close)
        self._identity: Identity | None = None
        self.experts = self.expert_profile = None
        self._place_experts(file.weights.expert_parts)
        self.model = Model(config, file.weights, self.operations, directions)

    @classmethod
    def load(cls, options: EngineOptions, log: Callable[[str], None] = lambda line: None) -> "Engine":
        """Load model and settings; raises ModelError with one line that says what is wrong."""
        try:
            path = options.model or embedded_model()
        except GgufError as error:
            raise ModelError(str(error)) from error
        notes: list[str] = []
        name, operations = _choose_backend(options, notes.append)
        try:
            file = load_model(path, operations, log, round_x=options.activations == "int8")
        except operations.DEVICE_ERRORS as error:
            raise ModelError(f"the weights do not fit the device ({error}): use --backend cpu") from error
        for note in notes:  # not before a model that cannot be used has had its one line
            log(note)
        if name == "cuda":
            _check_widths(operations, file.config)
        return cls(options, file, (name, operations), log)

    def _place_experts(self, parts: list) -> None:
        """Experts on the device or beside it, those first that a profile ranks first."""
        options, n_experts = self.options, self.config.n_expert
        if self.backend == "cpu" or not parts:
            why = "the CPU computes, where all experts are at hand" if parts else "this model has no experts"
            for name in ("expert_cache_mib", "expert_profile_save"):
                if getattr(options, name):
                    self.log(f"--{name.replace('_', '-')} has no effect: {why}")
            return
        if options.expert_profile_save:
            model = self._known_identity().model
            self.expert_profile = ExpertProfile(options.expert_profile_save, model, len(parts), n_experts, self.log)
        ranking = self.expert_profile.read() if self.expert_profile else None
        shape = self.config.cache_shape(self.max_context, self.cell_format)
        reserved = shape.device_bytes(options.kv_resident)
        try:
            self.experts = self.operations.place_experts(
                parts, ranking, options.expert_cache_mib * MIB, reserved, self.n_threads, self.log
            )
        except self.operations.ExpertError as error:
            raise ModelError(f"--expert-cache-mib {options.expert_cache_mib}: {error}") from error
        except self.operations.DEVICE_ERRORS as error:
            raise ModelError(f"the experts do not fit the device ({error}): give less --expert-cache-mib") from error

    @property
    def n_experts_copied(self) -> int:
        """Routed experts brought to the device so far."""
        return self.experts.n_copied if self.experts else 0

    def tokens_read(self, n: int) -> None:
        """Between two passes: the moment at which experts may change places."""
        if self.experts:
            self.experts.tokens_read(n)

    def save_expert_profile(self, *, at_once: bool) -> None:
        """Write the ranking of experts to its file, where one was asked for; not at_once: if the last is old."""
        if self.expert_profile:
            save = self.expert_profile.save if at_once else self.expert_profile.save_if_due
            save(self.experts.ranking)

    def info(self) -> dict[str, str]:
        """What the serve loop prints before READY, in its order."""
        identity = self._known_identity()
        return {
            "context": str(self.max_context),
            "kv": self.options.kv,
            "kv_resident": str(self.options.kv_resident),
            "backend": self.backend,
            "model": self.config.name,
            "n_vocab": str(self.n_vocab),
            "spec": str(self.spec),
            "conversation_cache_mib": str(self.options.conversation_cache_mib),
            "model_fp": f"{identity.model:016x}",
            "config_fp": f"{identity.config:016x}",
            "engine": VERSION,
        }

    def new_cache(self) -> Cache:
        """Pools and running state of a conversation; raises ModelError where the device has no room for them."""
        shape, n_resident = self.config.cache_shape(self.max_context, self.cell_format), self.options.kv_resident
        try:
            return Cache(shape, self.operations, n_resident)
        except self.operations.DEVICE_ERRORS as error:
            raise ModelError(
                f"the cells of {self.max_context} tokens do not fit the device ({error}):"
                " lower --max-context or keep fewer there with --kv-resident"
                + (", or lower --expert-cache-mib" if self.options.expert_cache_mib else "")
            ) from error

    def identity(self, phase: Callable[[str, int], None] | None = None) -> Identity:
        """Fingerprints of model and configuration, computed once; `phase` is told before files are read."""
        if self._identity is None:
            if phase:
                phase("fingerprint", SAMPLE_BYTES * len(self.model_paths))
            files = [FingerprintedFile(f"native shard {i}", path) for i, path in enumerate(self.model_paths)]
            try:
                model = model_fingerprint(files)
            except FingerprintError as error:
                raise SessionError("io", "fingerprint", str(error)) from error
            self._identity = Identity(model, config_fingerprint(self._configuration()))
        return self._identity

    def _known_identity(self) -> Identity:
        try:
            return self.identity()
        except SessionError as error:
            raise ModelError(str(error)) from error

    def _configuration(self) -> Config:
        c = self.config
        rope = Rope(
            type=0 if c.arch in PAIRED_ROPE else 2,  # as ggml numbers them
            freq_base=c.rope_base,
            factor=c.rope_factor,
            freq_scale=1 / c.rope_factor,
            orig_ctx=float(c.n_ctx),
            ext_factor=0.0,
            attn_factor=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
        )
        return Config(
            engine=VERSION,
            backend=self.backend,
            kv=self.options.kv,
            max_context=self.max_context,
            kv_resident=self.options.kv_resident,
            mtp_window=self.spec if c.n_draft else -1,
            rope=rope,
            cvec=self.cvec_digest,
            switches=[("activations_int8", int(self.options.activations == "int8"))],
        )


def _choose_backend(options: EngineOptions, log):
    """Name and module of the backend, before weights are packed for it."""
    try:
        name, operations = backend.choose(options.backend, log)
    except backend.BackendError as error:
        raise ModelError(f"--backend {options.backend}: {error}") from error
    if options.kv_resident and name == "cpu":
        raise ModelError("--kv-resident: only a CUDA backend keeps cells elsewhere; leave it out")
    if 0 < options.kv_resident < LEAST_RESIDENT:
        raise ModelError(f"--kv-resident {options.kv_resident}: at least {LEAST_RESIDENT}, or 0 for all")
    return name, operations


def _check_widths(operations, config) -> None:
    try:
        backend.check_widths(operations, config.head_dim, config.idx_dim, config.gdn_state)
    except backend.BackendError as error:
        raise ModelError(str(error)) from error


def _choose_format(name: str, head_dim: int):
    fitting = formats_for(head_dim)
    if name not in fitting:
        raise ModelError(f"--kv {name}: a head width of {head_dim} can hold {', '.join(fitting) or 'no format'}")
    return FORMATS[name]


def _choose_window(asked: int | None, n_draft: int, log) -> int:
    if not n_draft:
        if asked is not None and asked > 1:
            log(f"--spec {asked} has no effect: this model has no draft layer")
        return 1
    window = 4 if asked is None else asked
    if not 1 <= window <= MARGIN:
        raise ModelError(f"--spec {window}: expected 1 to {MARGIN}")
    return window


def _choose_threads(asked: int | None, log) -> int:
    """Threads that compute, never more than can run at once: the others would be waited for."""
    if asked is None:
        return resources.usable_cores()
    if asked > resources.all_processors():
        raise ModelError(f"--threads {asked}: this machine runs at most {resources.all_processors()}")
    allowed = resources.allowed_processors()
    if asked > allowed:
        log(f"--threads {asked} is taken as {allowed}: this process's affinity lets no more run at once")
    return min(asked, allowed)


def _load_directions(text: str | None, config):
    if not text:
        return None, 0
    try:
        return controlvector.load(text, config.n_layers, config.n_embd)
    except controlvector.ControlVectorError as error:
        raise ModelError(f"--control-vector: {error}") from error


def _available_bytes() -> int:
    return resources.available_bytes()


class Session:
    """One conversation: the live one, its checkpoints, and those parked beside it."""

    def __init__(self, engine: Engine):
        options = engine.options
        self.engine = engine
        self.cache = engine.new_cache()
        self.checkpoints = Checkpoints(options.prompt_cache)
        self.parking = ParkingLot(
            options.conversation_cache_mib * MIB if options.prompt_cache else 0,
            options.conversation_cache_slots,
            options.conversation_cache_min_free_mib * MIB,
            _available_bytes,
        )
        self._complete = False  # whether the live state is a conversation that may be resumed, saved or parked
        self._clock = 0  # stamp of the latest use
        self._used = 0  # stamp of the live conversation
        self._counters = dict.fromkeys(("requests", "hits", "saves", "restores"), 0)

    @property
    def n_tokens(self) -> int:
        """Tokens of the complete conversation held, 0 if none is."""
        return self.cache.n_tokens if self._complete else 0

    def warm_up(self) -> None:
        """Run everything that a request runs once, so that no request waits for kernels to be compiled."""
        model, cache, ids = self.engine.model, self.cache, np.zeros(2, np.int32)
        started = time.perf_counter()
        window = model.append(cache, ids)
        model.commit(cache, model.speculate(cache, ids[:1]), 1)
        model.ops.to_host(model.logits(window.residual))
        if self.engine.spec > 1:
            model.draft_logits(model.draft(cache, window.residual, ids, 0))
        cache.zero()
        if self.engine.experts:
            self.engine.experts.forget()
        seconds = time.perf_counter() - started
        if seconds > SLOW_START_S:
            self.engine.log(f"kernels were compiled in {seconds:.0f} s; {KERNELS.outlook()}")

    def close(self) -> None:
        """Nothing outlives a session but its files."""
        self.parking.entries.clear()
        self.engine.save_expert_profile(at_once=True)

    def stats(self) -> dict:
        """What is held, as plain JSON types."""
        chain = [{"tokens": c.n_tokens, "bytes": c.snapshot.size_bytes, "root": c.root} for c in self.checkpoints.chain]
        parked = [{"tokens": entry.live.n_tokens, "bytes": entry.size_bytes} for entry in self.parking.entries]
        return {
            "held_tokens": self.n_tokens,
            "max_context": self.engine.max_context,
            "checkpoints": chain,
            "parked": parked,
            "pool_bytes": self.cache.size_bytes,
            "counters": dict(self._counters),
        }

    # --- generation

    def generate(self, request: GenRequest, stopped: Callable[[], bool] = lambda: False) -> Iterator[NamedTuple]:
        """Check a request, then return its events; raises RequestError before anything changes."""
        n_prompt, engine = len(request.prompt), self.engine
        if not n_prompt:
            raise RequestError("the prompt is empty")
        for name, ids in (("prompt", request.prompt), ("stop", np.array(sorted(request.stop)))):
            if len(ids) and (ids.min() < 0 or ids.max() >= engine.n_vocab):
                raise RequestError(f"a {name} id is outside the vocabulary of {engine.n_vocab}")
        if n_prompt + request.max_new + MARGIN > engine.max_context:
            raise RequestError(
                f"{n_prompt} prompt tokens + {request.max_new} new ones + {MARGIN} do not fit"
                f" the context of {engine.max_context}"
            )
        return _Generation(self, request, stopped).events()

    def tick(self) -> int:
        """The stamp of a new use."""
        self._clock = min(self._clock + 1, LAST_STAMP)
        return self._clock

    def resume(self, prompt: np.ndarray) -> int:
        """Make the cache hold the longest start of the prompt that anything held offers; returns its tokens."""
        self._counters["requests"] += 1
        n_resumed = self._resume(prompt) if self.engine.options.prompt_cache else self._forget()
        self._complete = False
        self._counters["hits"] += n_resumed > 0
        self.checkpoints.cut(n_resumed)
        return n_resumed

    def _resume(self, prompt: np.ndarray) -> int:
        if self._complete and is_prefix(self.cache.ids, prompt):
            live, checkpoint = self.cache.n_tokens, None
        else:
            checkpoint = self.checkpoints.longest_prefix(prompt)
            live = checkpoint.n_tokens if checkpoint else 0
        parked = self.parking.best(prompt, live)
        if parked:
            return self._unpark(*parked)
        if self._complete and self.cache.n_tokens != live:
            self.parking.park(self.cache, self.checkpoints, self._used)
        if checkpoint:
            checkpoint.used = self.tick()
            self.cache.rewind(checkpoint.snapshot)
        elif not live:
            self._forget()
        return live

    def _unpark(self, entry, record) -> int:
        self.parking.remove(entry)
        if self._complete:
            self.parking.park(self.cache, self.checkpoints, self._used)
        entry.unpark(self.cache)
        self.checkpoints.chain = list(entry.checkpoints)
        self.cache.rewind(record.snapshot)
        record.used = self.tick()
        return record.n_tokens

    def _forget(self) -> int:
        self.cache.zero()
        self.checkpoints.chain = []
        return 0

    def finish(self, *, complete: bool) -> None:
        """End a request: what the cache holds is a conversation, or nothing is."""
        self._complete = complete
        self._used = self.tick()

    def erase(self) -> int:
        """Forget the live conversation and its checkpoints; returns how many tokens it had."""
        n_tokens = self.n_tokens
        self._forget()
        self._complete = False
        return n_tokens

    # --- files

    def save(self, path: str, *, progress=None, phase=None) -> Outcome:
        """Write the conversation held to `path`; changes nothing that is held. Raises SessionError."""
        started = time.perf_counter()
        engine, cache = self.engine, self.cache
        if not engine.options.prompt_cache:
            raise SessionError("invalid", "off", "--prompt-cache 0 turns session files off")
        if not self._complete:
            raise SessionError("invalid", "nothing-held", "nothing to save: no complete conversation is held")
        identity = engine.identity(phase)
        checkpoint = self.checkpoints.deepest()
        state_bytes = sum(cache.shape.state_sizes)
        windows = cache.windows(cache.n_tokens)
        need_bytes = save_peak_bytes(
            checkpoint.snapshot.size_bytes if checkpoint else 0, state_bytes, cache.n_tokens, 0, len(windows)
        )
        refusal = self._admit(need_bytes)
        if refusal:
            raise SessionError("memory", "admit", refusal)
        if phase:
            phase("capture", state_bytes)
        image = sessionstate.image_of(cache, engine.config.n_layers, bool(engine.cvec_digest), self._used, checkpoint)
        reserve_bytes = engine.options.session_min_free_mib * MIB
        size_bytes = write_session(
            path, image, identity, windows, reserve_bytes=reserve_bytes, progress=progress, phase=phase, warn=engine.log
        )
        self._counters["saves"] += 1
        return Outcome(cache.n_tokens, size_bytes, 1e3 * (time.perf_counter() - started))

    def _admit(self, need_bytes: int) -> str | None:
        """Why `need_bytes` of RAM cannot be had above the floor, or None."""
        floor = self.engine.options.conversation_cache_min_free_mib
        available = _available_bytes()
        if available >= floor * MIB and need_bytes <= available - floor * MIB:
            return None
        need, free = -(-need_bytes // MIB), available // MIB
        return f"{need} MiB of RAM are needed above a floor of {floor} MiB, {free} MiB are available"

    def restore(self, path: str, *, progress=None, phase=None) -> Outcome:
        """Replace the live conversation and its checkpoints by those of a file; parked ones stay.

        Raises SessionError with everything as it was, or FatalError when a pool was already written.
        """
        started = time.perf_counter()
        engine, cache = self.engine, self.cache
        if not engine.options.prompt_cache:
            raise SessionError("invalid", "off", "--prompt-cache 0 turns session files off")
        limits = sessionstate.limits_of(
            cache, engine.max_context, max(engine.options.prompt_cache, 1), engine.config.n_layers
        )
        # The read pass is the first half of the work, the apply pass the second.
        report = progress or (lambda done, total: None)
        reader = SessionReader(
            path,
            engine.identity(phase),
            limits,
            admit=self._admit,
            progress=lambda done, total: report(done, 2 * total),
            keep_state=False,
        )
        with reader:
            if phase:
                phase("validate", reader.size_bytes)
            sessionstate.validate(reader.image, cache, engine.max_context, engine.n_vocab, bool(engine.cvec_digest))
            self._apply(reader, phase, report)
        self._counters["restores"] += 1
        return Outcome(cache.n_tokens, reader.size_bytes, 1e3 * (time.perf_counter() - started))

    def _apply(self, reader: SessionReader, phase, report) -> None:
        cache, image = self.cache, reader.image
        try:
            records = [sessionstate.live_sink(cache)]
            records += [sessionstate.checkpoint_sink(cache) for _ in image.checkpoints]
        except MemoryError as error:
            raise SessionError("memory", "memory", "not enough memory for the file's checkpoints") from error
        if phase:
            phase("transfer", reader.size_bytes)
        windows = cache.windows(image.live.n_tokens)
        try:
            reader.apply(windows, records, progress=lambda done, total: report(total + done, 2 * total))
        except SessionError as error:
            if reader.touched:
                raise FatalError(f"a restore failed after the conversation was overwritten: {error}") from error
            raise
        cache.rewind(records[0].snapshot(image.live.ids))
        self.checkpoints.chain = []
        for record, sink in zip(image.checkpoints, records[1:], strict=True):
            self.checkpoints.add(sink.snapshot(record.ids), record.used)
        self._used = image.live.used
        self._clock = max(self._clock, self._used, *(record.used for record in image.records))
        self._complete = True


class _Generation:
    """One request on its way: prompt, then windows of one token and its drafts."""

    def __init__(self, session: Session, request: GenRequest, stopped: Callable[[], bool]):
        self.session, self.request, self.stopped = session, request, stopped
        self.engine, self.model, self.cache = session.engine, session.engine.model, session.cache
        self.stop_ids = self.engine.end_ids | request.stop
        seed = request.sampling.seed
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.context = np.empty(len(request.prompt) + request.max_new + MARGIN, np.int32)  # prompt, then the answer
        self.context[: len(request.prompt)] = request.prompt
        self.n_context = len(request.prompt)
        self.finish = ""
        self.residual = None  # [1, C, N] of the prompt's last token, the backend's array
        self.drafts_accepted = self.drafts_offered = 0
        self.n_copied = self.engine.n_experts_copied

    @property
    def n_generated(self) -> int:
        return self.n_context - len(self.request.prompt)

    def events(self) -> Iterator[NamedTuple]:
        """The request's events; a generator that is abandoned leaves nothing complete."""
        try:
            yield from self._events()
        except self.engine.operations.DEVICE_ERRORS as error:
            raise FatalError(f"the device failed in a request: {error}") from error

    def _events(self) -> Iterator[NamedTuple]:
        """Resume, prompt progress, Reused, tokens, Done."""
        started = time.perf_counter()
        n_reused = self.session.resume(self.request.prompt)
        yield Resume(n_reused)
        yield from self._read_prompt(started)
        yield Reused(n_reused)
        prompt_ms = 1e3 * (time.perf_counter() - started)
        started = time.perf_counter()
        n_prompt, n_read, is_read = len(self.request.prompt), self.cache.n_tokens - n_reused, not self.finish
        if is_read:
            for token in self._answer():
                yield Token(token)
        self.session.finish(complete=is_read and self.request.checkpoint)
        yield Done(
            self.n_generated, n_prompt, prompt_ms, 1e3 * (time.perf_counter() - started), self.finish,
            self.drafts_accepted, self.drafts_offered, n_reused, int(n_reused > 0), 1,
            len(self.session.parking.entries), 0, 0.0, n_read, self.engine.n_experts_copied - self.n_copied,
        )  # fmt: skip
        self.engine.save_expert_profile(at_once=False)

    # --- the prompt

    def _read_prompt(self, started: float) -> Iterator[PromptProgress]:
        """Read what is not held, chunk by chunk; leaves the residual of the last token for the answer."""
        prompt, n_prompt = self.request.prompt, len(self.request.prompt)
        marks = self._checkpoint_marks()
        resumed = self.cache.n_tokens
        while self.cache.n_tokens < n_prompt:
            first = self.cache.n_tokens
            if self.stopped():
                # The rest of the prompt may come again: what was read so far is kept as a checkpoint.
                self._checkpoint(root=False)
                self.finish = "cancel"
                return
            last = min([first + CHUNK, n_prompt, *(mark for mark in marks if mark > first)])
            residual = self.model.append(self.cache, prompt[first:last]).residual
            self.engine.tokens_read(last - first)
            self._fill_draft(residual, prompt[first + 1 : last + 1], first)
            if last in marks or self._is_periodic(first, last):
                self._checkpoint(root=marks.get(last, False))
            seconds = time.perf_counter() - started
            rate = (last - resumed) / seconds if seconds else 0.0
            self.residual = residual[-1:]
            yield PromptProgress(last, n_prompt, 1e3 * seconds, rate)

    def _checkpoint_marks(self) -> dict[int, bool]:
        """Positions of the prompt at which to take a checkpoint, and whether it is the root.

        The last turn start, so that the next turn can come back before its header (in a prompt without turns the last
        token, so that the same prompt can); and, when reading from 0, the first turn start behind a long system prompt.
        """
        options, start = self.engine.options, self.engine.turn_start_id
        if not self.request.checkpoint or not options.prompt_cache:
            return {}
        turns = np.flatnonzero(self.request.prompt == start) if start is not None else np.empty(0, np.int64)
        later = turns[turns > 0]
        marks = {int(later[-1]) if len(later) else len(self.request.prompt) - 1: False}
        if not self.cache.n_tokens and len(later) and later[0] >= options.prompt_cache_root:
            marks[int(later[0])] = True
        return marks

    def _is_periodic(self, first: int, last: int) -> bool:
        every = self.engine.options.prompt_cache_every
        return every > 0 and first // every < last // every

    def _checkpoint(self, *, root: bool) -> None:
        if self.request.checkpoint and self.engine.options.prompt_cache and self.cache.n_tokens:
            self.session.checkpoints.add(self.cache.capture(), self.session.tick(), root=root)

    def _fill_draft(self, residual, next_ids: np.ndarray, first_cell: int):
        """Cells of the draft layer for every token whose successor is known; returns their residual."""
        if self.engine.spec == 1 or not len(next_ids):
            return None
        return self.model.draft(self.cache, residual[: len(next_ids)], next_ids, first_cell)

    # --- the answer

    def _answer(self) -> Iterator[int]:
        """Tokens until one ends the answer or the request; the last one emitted is never consumed."""
        residual = self.residual
        if not self.request.max_new:
            self.finish = "length"
            return
        yield from self._emit(self._choices(self.model.logits(residual), []))
        first_cell = self.cache.n_tokens - 1
        while not self.finish:
            if self.stopped():
                self.finish = "cancel"
                break
            pending = self.context[self.n_context - 1 : self.n_context].copy()
            drafts = self._drafts(residual, first_cell)
            window = self.model.speculate(self.cache, np.concatenate([pending, drafts]))
            first_cell = self.cache.n_tokens
            tokens = self._choices(self.model.logits(window.residual), drafts)
            self.model.commit(self.cache, window, len(tokens))
            self.engine.tokens_read(len(tokens))
            self.drafts_offered += len(drafts)
            self.drafts_accepted += len(tokens) - 1
            residual = window.residual[: len(tokens)]
            yield from self._emit(tokens)
        self._fill_draft(residual, self._successors(residual), first_cell)

    def _choices(self, logits, drafts) -> list[int]:
        """The tokens that follow: the choice after each row, as long as the drafts before it were chosen themselves."""
        tokens: list[int] = []
        greedy = self.request.sampling.greedy
        rows = self.model.ops.greedy(logits) if greedy else self.model.ops.to_host(logits)
        for row in range(len(rows)):
            at = self.n_context + row
            sampling = self.request.sampling
            token = int(rows[row]) if greedy else choose(rows[row], self.context[:at], sampling, self.seed)
            self.context[at] = token
            tokens.append(token)
            done = token in self.stop_ids or at + 1 - len(self.request.prompt) >= self.request.max_new
            if done or row >= len(drafts) or token != drafts[row]:
                return tokens
        return tokens

    def _emit(self, tokens: list[int]) -> Iterator[int]:
        for token in tokens:
            self.n_context += 1
            if token in self.stop_ids:
                self.finish = "stop"
            elif self.n_generated >= self.request.max_new:
                self.finish = "length"
            yield token

    def _successors(self, residual) -> np.ndarray:
        """The tokens emitted after each row of the latest window."""
        return self.context[self.n_context - residual.shape[0] : self.n_context]

    def _drafts(self, residual, first_cell: int) -> np.ndarray:
        """Fill the draft layer's cells of the last window, then guess on from the last one, greedily."""
        drafts: list[int] = []
        n_wanted = min(self.engine.spec, self.request.max_new - self.n_generated) - 1
        rows = self._fill_draft(residual, self._successors(residual), first_cell)
        cell = first_cell + residual.shape[0]
        while rows is not None and len(drafts) < n_wanted:
            token, share = self.model.ops.greedy_with_share(self.model.draft_logits(rows[-1:]))
            if share[0] < DRAFT_FLOOR:
                break
            drafts.append(int(token[0]))
            if len(drafts) < n_wanted:
                rows = self.model.draft(self.cache, rows[-1:], np.array(drafts[-1:], np.int32), cell)
                cell += 1
        return np.array(drafts, np.int32)
