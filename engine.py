"""The engine, which never changes once loaded, and the session: one mutable conversation.

It owns loading, identity and the timeline: what is held, resumed, generated, saved and restored. It knows no HTTP, no
text and no file bytes. Invariant: between requests the session holds either a complete conversation or none, and a
refused request, save or restore leaves it as it was. Read next: model.py (a pass), promptcache.py (what serves a
prompt), sessionstate.py (a conversation as a file).
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import backend
import controlvector
import resources
import sessionstate
from cells import FORMATS, CellFormat, formats_for
from conversations import MIB, Conversations
from expertprofile import ExpertProfile
from fingerprint import Config, FingerprintError, ModelFile, Rope, config_fingerprint, model_fingerprint
from generation import FatalError, Generation
from jit import KERNELS
from kvcache import Cache
from model import Model
from modelconfig import ModelConfig, ModelError
from modelfile import GgufError, embedded_model
from modelweights import LoadedModel, describe_model, load_model
from options import DEFAULT_CONTEXT, DEFAULT_WINDOW, VERSION, EngineOptions
from promptcache import Parked, Timeline, common_start
from sessionfile import SessionReader, read_tokens, write_session
from sessionfolder import names_at_exit
from sessionlayout import Identity, SessionError, save_peak_bytes
from storefolder import Store
from storekeeper import Keeper, identity_of
from storelayout import StoreError
from verbs import SPARE_CELLS, GenRequest, RequestError, SessionDone

SLOW_START_S = 5.0  # a start that takes longer has compiled kernels and says so
NEW_NAME = re.compile(r"\.new[0-9]*\Z")  # what a save at the end adds to a name
SAMPLE_BYTES = 2 << 20  # read of each model file for its fingerprint


class Identification:
    """Fingerprints of model and configuration, computed when they are first asked for."""

    def __init__(self, model_paths: list[str], configuration: Config):
        self._model_paths, self.configuration = model_paths, configuration
        self._identity: Identity | None = None

    def identity(self, phase: Callable[[str, int], None] | None = None) -> Identity:
        """What a session file belongs to; `phase` is told before files are read. Raises SessionError."""
        if self._identity is None:
            if phase:
                phase("fingerprint", SAMPLE_BYTES * len(self._model_paths))
            files = [ModelFile(f"native shard {i}", path) for i, path in enumerate(self._model_paths)]
            try:
                model = model_fingerprint(files)
            except FingerprintError as error:
                raise SessionError("io", "fingerprint", str(error)) from error
            self._identity = Identity(model, config_fingerprint(self.configuration))
        return self._identity

    def at_start(self) -> Identity:
        """The same while the engine is loaded; raises ModelError."""
        try:
            return self.identity()
        except SessionError as error:
            raise ModelError(str(error)) from error


@dataclass(eq=False, repr=False)
class Engine:
    """A loaded model with its backend and settings; `load` makes one."""

    options: EngineOptions
    config: ModelConfig
    ops: backend.Backend
    model: Model | None  # None where nothing is computed
    end_ids: frozenset[int]  # tokens that end an answer
    turn_start_id: int | None
    max_context: int
    cell_format: CellFormat
    spec: int  # tokens that the model is asked about at once, 1 without a draft layer
    cvec_digest: int  # of the control vector, 0 without one
    identification: Identification
    log: Callable[[str], None]
    experts: object | None = None  # where a device has room for some of them
    expert_profile: ExpertProfile | None = None

    @classmethod
    def load(cls, options: EngineOptions, log: Callable[[str], None] = lambda line: None) -> "Engine":
        """Load model and settings; raises ModelError with one line that says what is wrong."""
        notes: list[str] = []
        path, ops = _model_path(options), _load_backend(options, notes.append)
        try:
            file = load_model(path, ops, log, round_x=options.activations == "int8")
            ops.check_widths(file.config.head_dim, file.config.idx_dim, file.config.gdn_state)
        except backend.BackendError as error:
            raise ModelError(str(error)) from error
        except ops.errors as error:
            raise ModelError(f"the weights do not fit the device ({error}): use --backend cpu") from error
        for note in notes:  # not before a model that cannot be used has had its one line
            log(note)
        engine, directions = cls._set_up(options, file, ops, ops.name, log)
        config, identification = file.config, engine.identification
        if parts := _experts_to_place(options, ops, file.weights.expert_parts, log):
            profile = _expert_profile(options.expert_profile_save, identification, len(parts), config.n_expert, log)
            engine.expert_profile = profile
            engine.experts = _place_experts(options, ops, parts, profile, engine.cache_bytes(engine.max_context), log)
        engine.model = Model(config, file.weights, ops, directions)  # behind the experts, whose places it takes over
        return engine

    @classmethod
    def outline(cls, options: EngineOptions, log: Callable[[str], None] = lambda line: None) -> "Engine":
        """The same without weights and on the CPU: it identifies, holds and moves conversations, and computes nothing.

        Conversations are those of an engine with these options, also on a device that is not here.
        """
        ops, name = backend.load("cpu", 1, log), backend.choose(options.backend, lambda why: None)
        return cls._set_up(options, describe_model(_model_path(options)), ops, name, log)[0]

    @classmethod
    def _set_up(cls, options: EngineOptions, file: LoadedModel, ops: backend.Backend, backend_name: str, log):
        """An engine without its weights, and the directions of the control vector."""
        config = file.config
        max_context = _max_context(options.max_context, config.n_ctx, log)
        cell_format = _cell_format(options.kv, config.head_dim)
        spec = _window(options.spec, config.n_draft, log)
        directions, cvec_digest = _load_directions(options.control_vector, config)
        configuration = _configuration(options, config, backend_name, max_context, spec, cvec_digest)
        engine = cls(
            options=options,
            config=config,
            ops=ops,
            model=None,
            end_ids=file.end_ids,
            turn_start_id=file.turn_start_id,
            max_context=max_context,
            cell_format=cell_format,
            spec=spec,
            cvec_digest=cvec_digest,
            identification=Identification(file.paths, configuration),
            log=log,
        )
        return engine, directions

    @property
    def n_vocab(self) -> int:
        return self.config.n_vocab

    @property
    def expert_counts(self) -> tuple[int, int, int]:
        """Uses of experts that were on the device, all uses, and experts brought there so far."""
        return (self.experts.n_found, self.experts.n_used, self.experts.n_copied) if self.experts else (0, 0, 0)

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
        identity = self.identification.at_start()
        return {
            "context": str(self.max_context),
            "kv": self.options.kv,
            "kv_resident": str(self.options.kv_resident),
            "backend": self.ops.name,
            "model": self.config.name,
            "n_vocab": str(self.n_vocab),
            "spec": str(self.spec),
            "conversation_cache_mib": str(self.options.conversation_cache_mib or 0),
            "model_fp": f"{identity.model:016x}",
            "config_fp": f"{identity.config:016x}",
            "engine": VERSION,
        }

    def cache_bytes(self, n_tokens: int) -> int:
        """Memory that a cache for so many tokens takes."""
        return self.config.cache_shape(n_tokens, self.cell_format).device_bytes(self.options.kv_resident)

    def new_cache(self, n_tokens: int | None = None) -> Cache:
        """Pools and running state of a conversation of at most `n_tokens`, by default as long as the context.

        Raises ModelError where the device has no room for them.
        """
        n_tokens = n_tokens or self.max_context
        n_resident = self.options.kv_resident if self.ops.own_memory else 0
        shape = self.config.cache_shape(n_tokens, self.cell_format)
        try:
            return Cache(shape, self.ops, n_resident)
        except self.ops.errors as error:
            raise ModelError(
                f"the cells of {n_tokens} tokens do not fit the device ({error}):"
                " lower --max-context or keep fewer there with --kv-resident"
                + (", or lower --expert-cache-mib" if self.options.expert_cache_mib else "")
            ) from error

    def identity(self, phase: Callable[[str, int], None] | None = None) -> Identity:
        """What a session file of this engine belongs to; `phase` is told before files are read."""
        return self.identification.identity(phase)


def _configuration(options: EngineOptions, c: ModelConfig, backend_name, max_context, spec, cvec_digest) -> Config:
    """All that decides the bits of a conversation, beside the model."""
    rope = Rope(
        type=0 if c.family.paired_rope else 2,  # as ggml numbers them
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
        backend=backend_name,
        kv=options.kv,
        max_context=max_context,
        kv_resident=options.kv_resident,
        mtp_window=spec if c.n_draft else -1,
        rope=rope,
        cvec=cvec_digest,
        switches=[("activations_int8", int(options.activations == "int8"))],
    )


def _model_path(options: EngineOptions) -> str:
    try:
        return options.model or embedded_model()
    except GgufError as error:
        raise ModelError(str(error)) from error


def _load_backend(options: EngineOptions, log) -> backend.Backend:
    """The backend, before weights are packed for it."""
    try:
        ops = backend.load(options.backend, _n_threads(options.threads, log), log)
    except backend.BackendError as error:
        raise ModelError(f"--backend {options.backend}: {error}") from error
    if options.kv_resident and not ops.own_memory:
        raise ModelError("--kv-resident: only a CUDA backend keeps cells elsewhere; leave it out")
    return ops


def _experts_to_place(options: EngineOptions, ops: backend.Backend, parts: list, log) -> list:
    """The layers whose experts a device may hold; options about them that have no effect are told."""
    if ops.own_memory and parts:
        return parts
    why = "the CPU computes, where all experts are at hand" if parts else "this model has no experts"
    for name in ("expert_cache_mib", "expert_profile_save"):
        if getattr(options, name):
            log(f"--{name.replace('_', '-')} has no effect: {why}")
    return []


def _expert_profile(path: str | None, identification: Identification, n_layers, n_experts, log) -> ExpertProfile | None:
    return ExpertProfile(path, identification.at_start().model, n_layers, n_experts, log) if path else None


def _place_experts(options: EngineOptions, ops: backend.Backend, parts: list, profile, reserved: int, log):
    """Experts on the device or beside it, those first that a profile ranks first; `reserved` bytes are for cells."""
    ranking = profile.read() if profile else None
    try:
        return ops.place_experts(parts, ranking, options.expert_cache_mib * MIB, reserved, ops.n_threads, log)
    except ValueError as error:
        raise ModelError(f"--expert-cache-mib {options.expert_cache_mib}: {error}") from error
    except ops.errors as error:
        raise ModelError(f"the experts do not fit the device ({error}): give less --expert-cache-mib") from error


def _keeper(engine: Engine) -> Keeper:
    """The store of a session; raises ModelError where its folder cannot be used."""
    options, found = engine.options, engine.identification
    model = found.at_start().model
    identities = {
        steered: identity_of(model, found.configuration if steered else found.configuration._replace(cvec=0))
        for steered in (True, False)
    }
    try:
        store = Store(options.store, options.store_mib * MIB, options.session_min_free_mib * MIB, engine.log)
    except StoreError as error:
        raise ModelError(f"--store: {error}") from error
    return Keeper(
        store, identities.__getitem__, drafts=engine.spec > 1, min_tokens=options.store_min_tokens,
        replay_s=options.store_replay_s, log=engine.log, errors=engine.ops.errors,
    )  # fmt: skip


def _max_context(asked: int | None, n_ctx: int, log) -> int:
    if asked is None:
        return min(n_ctx, DEFAULT_CONTEXT)
    if asked > n_ctx:
        log(f"--max-context {asked} is beyond the {n_ctx} tokens this model was made for")
    return asked


def _cell_format(name: str, head_dim: int) -> CellFormat:
    fitting = formats_for(head_dim)
    if name not in fitting:
        raise ModelError(f"--kv {name}: a head width of {head_dim} can hold {', '.join(fitting) or 'no format'}")
    return FORMATS[name]


def _window(asked: int | None, n_draft: int, log) -> int:
    """Tokens that the model is asked about at once; 1 where it has no draft layer."""
    if n_draft:
        return DEFAULT_WINDOW if asked is None else asked
    if asked is not None and asked > 1:
        log(f"--spec {asked} has no effect: this model has no draft layer")
    return 1


def _n_threads(asked: int | None, log) -> int:
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


class Session(Conversations):
    """The conversations in memory with the requests and the files that work on them."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self._n_saves = self._n_restores = 0
        if engine.options.store:
            self.keeper = _keeper(engine)

    def info(self) -> dict[str, str]:
        """What the serve loop prints before READY, in its order."""
        more = {"conversation_cache_mib": str(self.parking.budget_bytes // MIB)}
        if self.keeper:
            identities = dict.fromkeys(self.keeper.identity(steered).hex() for steered in (True, False))
            more["store"] = ",".join(identities)
        return self.engine.info() | more

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
        if self.keeper:
            self.keeper.finish()
        self.parking.entries.clear()
        self.engine.save_expert_profile(at_once=True)

    def stats(self) -> dict:
        """What is held, as plain JSON types."""
        chain = [{"tokens": c.n_tokens, "bytes": c.snapshot.size_bytes, "root": c.root} for c in self.checkpoints.chain]
        parked = [{"tokens": entry.n_tokens, "bytes": entry.size_bytes} for entry in self.parking.entries]
        kept = {"store": self.stored._asdict()} if self.stored else {}
        return kept | {
            "held_tokens": self.n_tokens,
            "max_context": self.engine.max_context,
            "checkpoints": chain,
            "parked": parked,
            "pool_bytes": self.cache.size_bytes,
            "counters": {
                "requests": self.n_requests,
                "hits": self.n_hits,
                "saves": self._n_saves,
                "restores": self._n_restores,
            },
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
        if n_prompt + request.max_new + SPARE_CELLS > engine.max_context:
            raise RequestError(
                f"{n_prompt} prompt tokens + {request.max_new} new ones + {SPARE_CELLS} do not fit"
                f" the context of {engine.max_context}"
            )
        return Generation(self, request, stopped).events()

    # --- files

    def save(self, path: str, *, progress=None, phase=None) -> SessionDone:
        """Write the latest conversation to `path`; changes nothing that is held. Raises SessionError."""
        self.settle()
        return self._write(path, self.held, progress, phase)

    def autosave(self, path: str, *, progress=None, phase=None) -> SessionDone:
        """Write what nobody has chosen: the longest conversation held, where the file's own is a start of it.

        Else the longest that continues the file's goes there and the longest of all beside it. Raises SessionError,
        with the file as it was, where none continues it.
        """
        held = self.all_held()
        saved = self._saved_ids(path) if held and os.path.lexists(path) else np.empty(0, np.int32)
        going_on = [one for one in held if common_start(saved, one.ids) == len(saved)]
        if held and not going_on:
            text = f"nothing that is held continues the conversation of {len(saved)} tokens there; it is left as it is"
            raise SessionError("invalid", "not-continued", text)
        outcome = self._write(path, going_on[0] if going_on else None, progress, phase)
        if going_on[0] is not held[0]:
            self._autosave_beside(held[0], path, phase)
        return outcome

    def _autosave_beside(self, longest: Timeline | Parked, path: str, phase) -> None:
        """A conversation that does not continue the file at `path`, in the first name behind it that it may take."""
        names = names_at_exit(NEW_NAME.sub("", path))
        for name in names[names.index(path) + 1 :] if path in names else names[1:]:
            try:
                saved = self._saved_ids(name) if os.path.lexists(name) else np.empty(0, np.int32)
                if common_start(saved, longest.ids) < len(saved):
                    continue
                done = self._write(name, longest, None, phase)
            except SessionError as error:
                if error.kind == "invalid":
                    continue
                self.engine.log(f"a longer conversation is not saved to '{name}': {error}")
                return
            self.engine.log(f"{done.n_tokens} tokens of another conversation than that of '{path}' are in '{name}'")
            return
        self.engine.log(f"a longer conversation than that of '{path}' is not saved: '{names[-1]}' is taken too")

    def _saved_ids(self, path: str) -> np.ndarray:
        """The tokens of a session file that this engine wrote; raises SessionError for any other."""
        identity, ids = read_tokens(path, self.engine.max_context)
        if identity != self.engine.identity():
            text = "that file is of another model or configuration; it is left as it is"
            raise SessionError("invalid", "not-continued", text)
        return ids

    def _write(self, path: str, held: Timeline | Parked | None, progress, phase) -> SessionDone:
        started = time.perf_counter()
        engine, shape = self.engine, self.cache.shape
        if not engine.options.prompt_cache:
            raise SessionError("invalid", "off", "--prompt-cache 0 turns session files off")
        if held is None:
            raise SessionError("invalid", "nothing-held", "nothing to save: no complete conversation is held")
        identity = engine.identity(phase)
        checkpoint, state_bytes = held.checkpoints.deepest(), sum(shape.state_sizes)
        sources = sessionstate.sources_of(held, self.cache)
        checkpoint_bytes = checkpoint.snapshot.size_bytes if checkpoint else 0
        refusal = self._admit(save_peak_bytes(checkpoint_bytes, state_bytes, held.n_tokens, 0, len(sources)))
        if refusal:
            raise SessionError("memory", "admit", refusal)
        if phase:
            phase("capture", state_bytes)
        image = sessionstate.image_of(held, shape, engine.config.n_layers, bool(engine.cvec_digest))
        reserve_bytes = engine.options.session_min_free_mib * MIB
        size_bytes = write_session(
            path, image, identity, sources, reserve_bytes=reserve_bytes, progress=progress, phase=phase, warn=engine.log
        )
        self._n_saves += 1
        return SessionDone(held.n_tokens, size_bytes, 1e3 * (time.perf_counter() - started))

    def _admit(self, need_bytes: int) -> str | None:
        """Why `need_bytes` of RAM cannot be had above the floor, or None."""
        floor = self.engine.options.conversation_cache_min_free_mib
        available = resources.available_bytes()
        if available >= floor * MIB and need_bytes <= available - floor * MIB:
            return None
        need, free = -(-need_bytes // MIB), available // MIB
        return f"{need} MiB of RAM are needed above a floor of {floor} MiB, {free} MiB are available"

    def restore(self, path: str, *, progress=None, phase=None) -> SessionDone:
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
        self._n_restores += 1
        return SessionDone(cache.n_tokens, reader.size_bytes, 1e3 * (time.perf_counter() - started))

    def _apply(self, reader: SessionReader, phase, report) -> None:
        if self.keeper:
            self.keeper.finish()
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
        self.live.used = image.live.used
        self._clock = max(self._clock, *(record.used for record in image.records))
        self.live.complete, self.beside, self._shown, self._n_latest = True, None, self._shown[:0], 0
        cache.steered = image.cvec or not self.engine.cvec_digest
