"""The options of `strata --serve`: their names, defaults, help texts and the values that each may have.

One field of a record below is one option: its flag, its key in a config file, its line in `--help` and in the manual
page, its default and the engine's command line are made from it. This module refuses to know what an option does, and
needs cells.py and the standard library alone. Invariant: a record that exists holds only values that its flags would
have taken. Read next: engine.py, which is started with the one; httpoptions.py, which checks the other further.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import cells

VERSION = "0.1.0"  # part of every saved file's identity, as another version may compute other bits
MAX_COUNT = 2**31 - 1  # every number on the command line is held in 32 bits somewhere
MAX_CONFIG_BYTES = 1 << 20
ACTIVATIONS = ("int8", "float")
BACKENDS = ("auto", "cpu", "cuda")
DEFAULT_CONTEXT = 4096  # at most, where the user names none: its pools are allocated at the start
DEFAULT_WINDOW, LONGEST_WINDOW = 4, 8  # tokens that a model with a draft layer is asked about at once
LEAST_RESIDENT = 20480  # cells on the device: what one chunk of a prompt selects must have room
EMBEDDED = "(default: the embedded model)"
SPLIT_OPTIONS = ("layer_split", "peer_device")
SPLIT_REFUSAL = "--layer-split and --peer-device do not exist here: one slot, one device"


class OptionRefused(argparse.ArgumentTypeError):
    """An option has a value that it cannot have, or the config file cannot be used; the text says why in one line."""


# --- What a value may be: text to value ---


def _number(low: int, high: int = MAX_COUNT) -> Callable[[str], int]:
    """A converter for whole numbers from `low` to `high`."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text[:11]) <= high and len(text) <= 10):
            raise OptionRefused(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return convert


def _resident(text: str) -> int:
    """A number of cells that stay on the device; 0 is all of them."""
    if 0 < (n_cells := _number(0)(text)) < LEAST_RESIDENT:
        raise OptionRefused(f"at least {LEAST_RESIDENT}, or 0 for all, found {n_cells}")
    return n_cells


def _choice(words: tuple[str, ...]) -> Callable[[str], str]:
    """A converter that takes one of some words."""

    def convert(text: str) -> str:
        if text not in words:
            raise OptionRefused(f"{text!r} is none of {', '.join(words)}")
        return text

    return convert


def _text(text: str) -> str:
    if not text:
        raise OptionRefused("it must not be empty")
    return text


def has_controls(text: str) -> bool:
    """Whether a name has a character that would move the cursor of a terminal or end a line."""
    return any(ord(char) < 0x20 or ord(char) == 0x7F for char in text)


def _file(text: str) -> str:
    """The name of a file that may not be there yet."""
    if not text.strip() or has_controls(text):
        raise OptionRefused(f"{text!r} is no name of a file")
    return text


def _folder(text: str) -> str:
    """The absolute path of a folder for session files, with links followed now: re-pointing one later moves nothing."""
    if not text.strip():
        raise OptionRefused("an empty folder name")
    if has_controls(text):
        raise OptionRefused(f"control characters in the folder name {text!r}")
    return os.path.realpath(text)


# --- Fields: what makes one an option ---


def _option(default: Any, metavar: str, text: str, convert: Callable, config_type: type = str) -> Any:
    """A field that is an option; `{default}` in its help text is its default."""
    details = {"convert": convert, "metavar": metavar, "help": text.format(default=default), "config_type": config_type}
    return field(default=default, metadata=details)


def _count(default: int | None, text: str, low: int = 1, high: int = MAX_COUNT) -> Any:
    return _option(default, "N", text, _number(low, high), int)


def _word(words: tuple[str, ...], default: str, text: str) -> Any:
    return _option(default, "|".join(words), text, _choice(words))


def _name(metavar: str, text: str, convert: Callable[[str], str] = _text) -> Any:
    """An option with a text that nothing stands in for."""
    return _option(None, metavar, text, convert)


class Option(NamedTuple):
    """One field of a record, as command line and config file see it."""

    name: str  # of the field, and of the key in a config file
    default: str | int | None
    convert: Callable[[str], str | int]
    metavar: str
    help: str
    config_type: type  # what a config file must give: str or int

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def converted(self, value: object, said: str) -> str | int:
        """A value that came as its own type; raises OptionRefused with what the user `said` in front."""
        if type(value) is not self.config_type:  # not isinstance: JSON's true is no number
            wanted = "a string" if self.config_type is str else "a whole number"
            raise OptionRefused(f"{said} must be {wanted}, found {json.dumps(value, default=repr)[:80]}")
        try:
            return self.convert(str(value))
        except OptionRefused as error:
            raise OptionRefused(f"{said}: {error}") from None


def options_of(record: type) -> tuple[Option, ...]:
    """The options that are the fields of a record."""
    return tuple(Option(name=entry.name, default=entry.default, **entry.metadata) for entry in fields(record))


class _Record:
    """A record that checks its own values."""

    def __post_init__(self):
        for option in options_of(type(self)):
            value = getattr(self, option.name)
            if value is not None or option.default is not None:
                option.converted(value, option.flag)

    def flags(self) -> list[str]:
        """The command line that gives this record."""
        options = options_of(type(self))
        given = [(option.flag, getattr(self, option.name)) for option in options]
        return [f"{flag}={value}" for flag, value in given if value is not None]


# --- The options ---


@dataclass(frozen=True)
class EngineOptions(_Record):
    """Options that reach the engine."""

    model: str | None = _name("PATH", f"GGUF file, or the first part of a split one {EMBEDDED}")
    slot_save_path: str | None = _name(
        "DIR",
        "folder for session files, created with mode 0700; relative paths of SAVE and RESTORE are taken below it",
        _folder,
    )
    store: str | None = _name(
        "DIR", "folder that keeps every conversation as it grows, for any prompt that begins like it", _folder
    )
    store_mib: int = _count(16384, "disk that the store takes at most (default: {default})")
    store_min_tokens: int = _count(256, "shortest conversation that the store keeps (default: {default})")
    store_replay_s: int = _count(
        2, "seconds of reading again that are not worth a state in the store (default: {default})", low=0
    )
    max_context: int | None = _count(
        None, f"cells of context (default: what the model was made for, at most {DEFAULT_CONTEXT})"
    )
    kv: str = _word(cells.NAMES, "fp16", "format of K and V (default: {default})")
    kv_resident: int = _option(
        0,
        "N",
        f"CUDA: keep N cells of each layer, at least {LEAST_RESIDENT}, in VRAM, all in pinned RAM"
        " (default: {default}, off)",
        _resident,
        int,
    )
    backend: str = _word(BACKENDS, "auto", "where the model runs (default: {default}, the best there is)")
    prompt_cache: int = _count(
        6, "checkpoints kept (default: {default}); 0 turns off reuse, parking and session files", low=0
    )
    prompt_cache_every: int = _count(16384, "tokens between two checkpoints (default: {default})")
    prompt_cache_root: int = _count(64, "shortest system prompt whose checkpoint stays (default: {default})", low=0)
    conversation_cache_mib: int | None = _count(
        None, "RAM for parked conversations (default: a quarter of what is free at the start); 0 is off", low=0
    )
    conversation_cache_slots: int = _count(32, "most parked conversations (default: {default})")
    conversation_cache_min_free_mib: int = _count(
        2560, "RAM that parking, SAVE and RESTORE leave free (default: {default})", low=0
    )
    session_min_free_mib: int = _count(4096, "disk that SAVE leaves free (default: {default}); 0 asks nothing", low=0)
    spec: int | None = _count(
        None,
        f"window of speculative decoding, at most {LONGEST_WINDOW} (default: {DEFAULT_WINDOW} with a draft layer);"
        " 1 is off",
        high=LONGEST_WINDOW,
    )
    threads: int | None = _count(None, "compute threads (default: the cores that this process may use)")
    control_vector: str | None = _name("FILE[:SCALE]", "control vector added to the model's layers (default: none)")
    activations: str = _word(
        ACTIVATIONS,
        "int8",
        "what quantised weights are multiplied with (default: {default}, rounded; float is exact and slower)",
    )
    expert_cache_mib: int = _count(
        0,
        "CUDA: VRAM for experts, the CPU computes with those that find no room (default: {default}, what is free)",
        low=0,
    )
    expert_profile_save: str | None = _name(
        "FILE",
        "CUDA: file that remembers which experts are used most; a start puts these into VRAM first (default: none)",
        _file,
    )


@dataclass(frozen=True)
class HttpOptions(_Record):
    """Options of the HTTP front. It checks them further, as it knows what a file name, an origin or a host is."""

    http: str | None = _name("[HOST:]PORT", "serve HTTP there; the engine runs as a child process")
    host: str | None = _name("HOST", "address to listen on, where --http names none (127.0.0.1 unless given)")
    api_key: str | None = _name("KEY", "what clients must send; without one, only known Host names are served")
    api_key_file: str | None = _name("FILE", "file that holds this key and nothing else (or STRATA_API_KEY)")
    trusted_origin: str | None = _name("ORIGIN[,ORIGIN]", "web pages that may use the server from a browser")
    allowed_host: str | None = _name("HOST[,HOST]", "further names under which this server is reached")
    session_restore_at_start: str | None = _name("NAME", "session file to restore when the server has started")
    session_save_at_exit: str | None = _name("NAME", "session file to save to when the server ends")
    engine_silence_s: int = _count(300, "seconds of silence that end the engine (default: {default})")


ALL_OPTIONS = options_of(EngineOptions) + options_of(HttpOptions)


# What decides whether a conversation belongs to an engine.
IDENTITY_OPTIONS = (
    "model", "max_context", "kv", "kv_resident", "backend", "spec", "control_vector", "activations",
)  # fmt: skip


# --- The command line and the config file ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option as an argument of a parser; what is not given stays away from its result."""
    engine = parser.add_argument_group("options of --serve")
    front = parser.add_argument_group("options of --serve with --http")
    _add(engine, options_of(EngineOptions), "serve")
    _add(front, options_of(HttpOptions), "serve")
    for name in SPLIT_OPTIONS:
        flag = "--" + name.replace("_", "-")
        engine.add_argument(flag, nargs="*", action=_RefuseSplit, help=argparse.SUPPRESS)


def _add(group, options: Iterable[Option], prefix: str) -> None:
    for option in options:
        group.add_argument(
            option.flag,
            dest=f"{prefix}_{option.name}",
            default=argparse.SUPPRESS,
            type=option.convert,
            metavar=option.metavar,
            help=option.help,
        )


def add_identity_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """The options that decide to which engine a conversation belongs, and some more, for a command."""
    named = [option for option in options_of(EngineOptions) if option.name in {*IDENTITY_OPTIONS, *more}]
    _add(parser.add_argument_group("options that the engine has"), named, "engine")


def read_identity_options(args: argparse.Namespace, **more) -> EngineOptions:
    """What `add_identity_arguments` has taken, with some fields more."""
    names = [option.name for option in options_of(EngineOptions) if hasattr(args, f"engine_{option.name}")]
    return EngineOptions(**{name: getattr(args, f"engine_{name}") for name in names} | more)


class _RefuseSplit(argparse.Action):
    """Stops the start for options that other engines have and that would be misleading if skipped."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(SPLIT_REFUSAL)


def given_flags(args: argparse.Namespace) -> list[str]:
    """The flags that stand on the command line, `--config` apart."""
    return [option.flag for option in ALL_OPTIONS if hasattr(args, f"serve_{option.name}")]


def read_options(args: argparse.Namespace) -> tuple[EngineOptions, HttpOptions]:
    """Every option: the flag, else the config file's value, else the default; raises OptionRefused."""
    given = _read_config(args.config) if args.config else {}
    for option in ALL_OPTIONS:
        if hasattr(args, f"serve_{option.name}"):
            given[option.name] = getattr(args, f"serve_{option.name}")
    engine, front = (
        {option.name: given[option.name] for option in options_of(record) if option.name in given}
        for record in (EngineOptions, HttpOptions)
    )
    if front and "http" not in front:
        idle = ", ".join(option.flag for option in options_of(HttpOptions) if option.name in front)
        raise OptionRefused(f"{idle} without --http: there is no server to use it")
    return EngineOptions(**engine), HttpOptions(**front)


def _read_config(path: str) -> dict[str, str | int]:
    """The options in a config file, each converted as its flag would be."""
    known = {option.name: option for option in ALL_OPTIONS}
    config = {}
    try:
        for key, value in _load_json_object(path).items():
            if key in SPLIT_OPTIONS:
                raise OptionRefused(f"{key}: {SPLIT_REFUSAL}")
            if key not in known:
                raise OptionRefused(f"unknown key {key!r}")
            config[key] = known[key].converted(value, key)
    except OptionRefused as error:
        raise OptionRefused(f"config file {path}: {error}") from None
    return config


def _load_json_object(path: str) -> dict:
    """The object in a JSON file; a key given twice is refused, as one of the two would be silently dropped."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        values = {}
        for key, value in pairs:
            if key in values:
                raise OptionRefused(f"key {key!r} is given twice")
            values[key] = value
        return values

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise OptionRefused(f"larger than {MAX_CONFIG_BYTES} bytes")
        values = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique)
    except OSError as error:
        raise OptionRefused(error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise OptionRefused(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise OptionRefused("expected one JSON object")
    return values
