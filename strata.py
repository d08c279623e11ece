"""The command line: options, progress bars, exit codes; the one place that turns exceptions into messages.

It knows nothing of how anything works: every command imports the module that does it. Invariant: importing this file
needs the standard library alone, so that `--help` is instant and a man page can be made from it. Exit codes: 0 done,
1 refused or failed, 2 wrong usage. Read next: serveloop.py for `--serve`, sessionfile.py for `session`.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

__version__ = "0.1.0"

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
MAX_COUNT = 2**31 - 1  # every number on the command line is held in 32 bits somewhere
MAX_CONFIG_BYTES = 1 << 20
LARGE_BYTES = 256 << 20  # a file below this is read before a line about it would be
KV_FORMATS = ("fp16", "int8", "q4_0", "k8v4")
ACTIVATIONS = ("int8", "float")
BACKENDS = ("auto", "cpu", "cuda")
EMBEDDED = "(default: the embedded model)"
SPLIT_OPTIONS = ("layer_split", "peer_device")
SPLIT_REFUSAL = "--layer-split and --peer-device do not exist here: one slot, one device"


class UsageError(Exception):
    """The command line or the config file asks for something that is not there; exit 2."""


class CommandError(Exception):
    """A command was refused or failed; exit 1."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    _open_standard_streams()
    parser = get_parser(commands="--serve" not in argv)
    args = parser.parse_args(argv)
    try:
        return _command(args)(args)
    except UsageError as error:
        parser.error(_one_line(error))
    except CommandError as error:
        _log(f"strata: {_one_line(error)}")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has gone. Python flushes stdout once more at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + 2


def _open_standard_streams() -> None:
    """Have nothing on each standard stream that was closed at the start, so that no file gets its number."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode))  # noqa: SIM115


def _command(args: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """The function that carries out what was asked."""
    if args.serve:
        return run_serve
    if not args.command:
        raise UsageError("name a command, or --serve for the engine; `strata --help` lists them")
    if given := [*_given_serve_options(args), *(["config"] if args.config else [])]:
        names = ", ".join(map(_flag, given))
        raise UsageError(f"{names} before a command: these belong to --serve")
    return args.run


# --- The parser ---


def get_parser(*, commands: bool = True) -> argparse.ArgumentParser:
    """The whole command line, as argparse-manpage reads it, or that of --serve.

    The latter has no `commands`: the value of a mistyped option would be taken for one, and the error would name it in
    place of the option.
    """
    parser = argparse.ArgumentParser(
        prog="strata",
        usage="strata (--serve [OPTION]... | COMMAND [ARGUMENT]...)",
        allow_abbrev=False,
        description="Serves one long conversation with a local language model and lets it survive a restart.",
        epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=f"strata {__version__}")
    parser.add_argument(
        "--serve", action="store_true", help="run the engine: verbs on stdin, answers on stdout, log on stderr"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON object with options of --serve, the same names with _ for -; an option given here as well wins",
    )
    _add_serve_options(parser)
    if commands:
        children = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="strata")
        for add in (_add_session, _add_filters, _add_warmup, _add_demo):
            add(children)
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of --serve")
    front = parser.add_argument_group("options of --serve with --http")
    for option in ALL_OPTIONS:
        (group if option in SERVE_OPTIONS else front).add_argument(
            _flag(option.name),
            dest=f"serve_{option.name}",
            default=argparse.SUPPRESS,
            type=option.convert,
            metavar=option.metavar,
            help=option.help,
        )
    for name in SPLIT_OPTIONS:
        group.add_argument(_flag(name), nargs="*", action=_RefuseSplit, help=argparse.SUPPRESS)


class _RefuseSplit(argparse.Action):
    """Stops the start for options that other engines have and that would be misleading if skipped."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(SPLIT_REFUSAL)


def _add_session(commands) -> None:
    session = commands.add_parser("session", allow_abbrev=False, help="look into session files and prove them sound")
    views = session.add_subparsers(dest="view", metavar="VIEW", required=True)
    for name, what, operand, run in (
        ("inspect", "what is in a file; reads its header and structure only", "FILE", run_inspect),
        ("verify", "read every byte and say what it proved; exit 0 only if all files are sound", "FILE", run_verify),
        ("list", "one line for each session file of a folder: tokens, bytes, time, name", "DIR", run_list),
    ):
        view = views.add_parser(name, allow_abbrev=False, help=what, description=f"{what[0].upper()}{what[1:]}.")
        if operand == "FILE":
            view.add_argument("files", metavar="FILE", nargs="+")
        else:
            view.add_argument("folder", metavar="DIR")
        view.add_argument("--json", action="store_true", help="print one JSON object a line in place of text")
        if name == "verify":
            view.add_argument("--quiet", action="store_true", help="print nothing on stderr while reading")
        view.set_defaults(run=run)


def _add_filters(commands) -> None:
    tokenize = commands.add_parser("tokenize", allow_abbrev=False, help="text on stdin to token ids on one line")
    tokenize.add_argument("--model", metavar="PATH", help=f"GGUF file whose tokenizer is used {EMBEDDED}")
    tokenize.add_argument(
        "--chat",
        action="store_true",
        help="render the text, less its last line end, as one user message through the model's chat template",
    )
    tokenize.set_defaults(run=run_tokenize)
    detokenize = commands.add_parser(
        "detokenize",
        allow_abbrev=False,
        help="lines 'T <id>' or plain ids on stdin to text, as they come; other lines go to stderr",
    )
    detokenize.add_argument("--model", metavar="PATH", help=f"GGUF file whose tokenizer is used {EMBEDDED}")
    detokenize.set_defaults(run=run_detokenize)


def _add_warmup(commands) -> None:
    warmup = commands.add_parser(
        "warmup", allow_abbrev=False, help="compile the kernels that are not in the cache yet, so that no start waits"
    )
    warmup.add_argument("--model", metavar="PATH", help=f"GGUF file whose kernels are compiled {EMBEDDED}")
    warmup.set_defaults(run=run_warmup)


def _add_demo(commands) -> None:
    demo = commands.add_parser(
        "demo", allow_abbrev=False, help="the whole story: read a long prompt, save, end, start again, restore, go on"
    )
    demo.add_argument("--model", metavar="PATH", help=f"GGUF file to run {EMBEDDED}")
    demo.set_defaults(run=run_demo)


# --- Options of --serve: one table for the flags, the config file and the defaults ---


class Option(NamedTuple):
    """One option; `name` is its key in the config file and its field in engine.EngineOptions."""

    name: str
    json_type: type  # what a config file must give: str or int
    default: str | int | None
    convert: Callable[[str], str | int]
    metavar: str
    help: str


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(low: int) -> Callable[[str], int]:
    """A converter for whole numbers of at least `low`."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text[:11]) <= MAX_COUNT and len(text) <= 10):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {MAX_COUNT}")
        return int(text)

    return convert


def _choice(words: tuple[str, ...]) -> Callable[[str], str]:
    """A converter that takes one of some words."""

    def convert(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return convert


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it must not be empty")
    return text


def _file(text: str) -> str:
    """The name of a file that may not be there yet."""
    if not text.strip() or any(ord(char) < 0x20 or ord(char) == 0x7F for char in text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file")
    return text


def _folder(text: str) -> str:
    """The absolute path of a folder for session files, with links followed now: re-pointing one later moves nothing."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty folder name")
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in text):
        raise argparse.ArgumentTypeError(f"control characters in the folder name {text!r}")
    return os.path.realpath(text)


SERVE_OPTIONS = (
    Option("model", str, None, _text, "PATH", f"GGUF file, or the first part of a split one {EMBEDDED}"),
    Option(
        "slot_save_path",
        str,
        None,
        _folder,
        "DIR",
        "folder for session files, created with mode 0700; relative paths of SAVE and RESTORE are taken below it",
    ),
    Option(
        "max_context",
        int,
        None,
        _number(1),
        "N",
        "cells of context (default: what the model was made for, at most 4096)",
    ),
    Option("kv", str, "fp16", _choice(KV_FORMATS), "|".join(KV_FORMATS), "format of K and V (default: fp16)"),
    Option(
        "kv_resident",
        int,
        0,
        _number(0),
        "N",
        "CUDA: keep N cells of each layer in VRAM, all in pinned RAM (default: 0, off)",
    ),
    Option(
        "backend",
        str,
        "auto",
        _choice(BACKENDS),
        "|".join(BACKENDS),
        "where the model runs (default: auto, the best there is)",
    ),
    Option(
        "prompt_cache",
        int,
        6,
        _number(0),
        "N",
        "checkpoints kept (default: 6); 0 turns off reuse, parking and session files",
    ),
    Option("prompt_cache_every", int, 16384, _number(1), "N", "tokens between two checkpoints (default: 16384)"),
    Option(
        "prompt_cache_root",
        int,
        64,
        _number(0),
        "N",
        "shortest system prompt whose checkpoint stays (default: 64)",
    ),
    Option(
        "conversation_cache_mib",
        int,
        None,
        _number(0),
        "N",
        "RAM for parked conversations (default: a quarter of what is free at the start); 0 is off",
    ),
    Option("conversation_cache_slots", int, 32, _number(1), "N", "most parked conversations (default: 32)"),
    Option(
        "conversation_cache_min_free_mib",
        int,
        2560,
        _number(0),
        "N",
        "RAM that parking, SAVE and RESTORE leave free (default: 2560)",
    ),
    Option(
        "session_min_free_mib", int, 4096, _number(0), "N", "disk that SAVE leaves free (default: 4096); 0 asks nothing"
    ),
    Option(
        "spec", int, None, _number(1), "N", "window of speculative decoding (default: 4 with a draft layer); 1 is off"
    ),
    Option("threads", int, None, _number(1), "N", "compute threads (default: the cores that this process may use)"),
    Option(
        "control_vector", str, None, _text, "FILE[:SCALE]", "control vector added to the model's layers (default: none)"
    ),
    Option(
        "activations",
        str,
        "int8",
        _choice(ACTIVATIONS),
        "|".join(ACTIVATIONS),
        "what quantised weights are multiplied with (default: int8, rounded; float is exact and slower)",
    ),
    Option(
        "expert_cache_mib",
        int,
        0,
        _number(0),
        "N",
        "CUDA: VRAM for experts, the CPU computes with those that find no room (default: 0, what is free)",
    ),
    Option(
        "expert_profile_save",
        str,
        None,
        _file,
        "FILE",
        "CUDA: file that remembers which experts are used most; a start puts these into VRAM first (default: none)",
    ),
)

# The front checks these further: it knows what a name, an origin or a host is.
HTTP_OPTIONS = (
    Option("http", str, None, _text, "[HOST:]PORT", "serve HTTP there; the engine runs as a child process"),
    Option("host", str, None, _text, "HOST", "address to listen on, where --http names none (127.0.0.1 unless given)"),
    Option("api_key", str, None, _text, "KEY", "what clients must send; without one, only known Host names are served"),
    Option("api_key_file", str, None, _text, "FILE", "file that holds this key and nothing else (or STRATA_API_KEY)"),
    Option("trusted_origin", str, None, _text, "ORIGIN[,ORIGIN]", "web pages that may use the server from a browser"),
    Option("allowed_host", str, None, _text, "HOST[,HOST]", "further names under which this server is reached"),
    Option("session_restore_at_start", str, None, _text, "NAME", "session file to restore when the server has started"),
    Option("session_save_at_exit", str, None, _text, "NAME", "session file to save to when the server ends"),
    Option("engine_silence_s", int, 300, _number(1), "N", "seconds of silence that end the engine (default: 300)"),
)
ALL_OPTIONS = SERVE_OPTIONS + HTTP_OPTIONS


def _given_serve_options(args: argparse.Namespace) -> dict[str, str | int]:
    """The options of --serve that stand on the command line."""
    given = vars(args)
    return {option.name: given[f"serve_{option.name}"] for option in ALL_OPTIONS if f"serve_{option.name}" in given}


def serve_options(args: argparse.Namespace) -> dict[str, str | int | None]:
    """Every option of the engine: the flag, else the config file's value, else the default.

    Raises UsageError for anything in the config file that is not an option of the right type.
    """
    return _options(args)[0]


def _options(args: argparse.Namespace) -> tuple[dict[str, str | int | None], dict[str, str | int | None]]:
    """The options of the engine, and those of the HTTP front."""
    given = (_read_config(args.config) if args.config else {}) | _given_serve_options(args)
    engine, front = (
        {option.name: given.get(option.name, option.default) for option in table}
        for table in (SERVE_OPTIONS, HTTP_OPTIONS)
    )
    engine["model"] = _model_path(engine["model"])
    if front["http"] is None and (idle := [_flag(name) for name in front if name in given]):
        raise UsageError(f"{', '.join(idle)} without --http: there is no server to use it")
    return engine, front


def _model_path(named: str | None) -> str:
    """The model that was named, else the one that comes with the package."""
    if named:
        return named
    import gguffile

    try:
        return gguffile.embedded_model()
    except gguffile.GgufError as error:
        raise UsageError(str(error)) from error


def _read_config(path: str) -> dict[str, str | int]:
    """The options in a config file, each converted as its flag would be."""
    values = _load_json_object(path)
    known = {option.name: option for option in ALL_OPTIONS}
    config = {}
    for key, value in values.items():
        if key in SPLIT_OPTIONS:
            raise UsageError(f"config file {path}: {key}: {SPLIT_REFUSAL}")
        if key not in known:
            raise UsageError(f"config file {path}: unknown key {key!r}")
        option = known[key]
        if type(value) is not option.json_type:  # not isinstance: JSON's true is no number
            wanted = "a string" if option.json_type is str else "a whole number"
            raise UsageError(f"config file {path}: {key} must be {wanted}, found {json.dumps(value)[:80]}")
        try:
            config[key] = option.convert(str(value))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"config file {path}: {key}: {error}") from None
    return config


def _load_json_object(path: str) -> dict:
    """The object in a JSON file; a key given twice is refused, as one of the two would be silently dropped."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        values = {}
        for key, value in pairs:
            if key in values:
                raise UsageError(f"config file {path}: key {key!r} is given twice")
            values[key] = value
        return values

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise UsageError(f"config file {path}: larger than {MAX_CONFIG_BYTES} bytes")
        values = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique)
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"config file {path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"config file {path}: expected one JSON object")
    return values


# --- Commands ---


def run_serve(args: argparse.Namespace) -> int:
    """The engine on stdin and stdout until QUIT or the end of input, or the HTTP front until a signal."""
    options, http = _options(args)
    if options["slot_save_path"] is not None:
        _create_folder(options["slot_save_path"])
    if http["http"] is not None:
        return _run_front(options, http, key_in_flags="api_key" in _given_serve_options(args))
    import engine
    import serveloop

    try:
        return serveloop.serve(engine.EngineOptions(**options), sys.stdin.buffer, sys.stdout.buffer, _log)
    except engine.ModelError as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError(f"not enough memory for this model and context: {error}") from error


def _run_front(options: dict, http: dict, *, key_in_flags: bool) -> int:
    """The HTTP front; its child is this program with the engine's options."""
    import httpfront

    flags = [f"{_flag(name)}={value}" for name, value in options.items() if value is not None]
    if http["api_key"] is not None and key_in_flags:
        _log("--api-key stands in the list of processes; --api-key-file and STRATA_API_KEY do not")
    try:
        front = httpfront.FrontOptions.from_flags(options["model"], options["slot_save_path"], **http)
        return httpfront.serve(front, [sys.executable, os.path.abspath(__file__), "--serve", *flags])
    except httpfront.OptionRefused as error:
        raise UsageError(str(error)) from error
    except httpfront.FrontError as error:
        raise CommandError(str(error)) from error


def _one_line(error: Exception) -> str:
    from printable import one_line

    return one_line(str(error))


def _log(text: str) -> None:
    """A text on stderr; what models and files say in it moves no cursor."""
    from printable import one_line

    print("\n".join(map(one_line, text.split("\n"))), file=sys.stderr, flush=True)


def _create_folder(path: str) -> None:
    """Make a folder for session files, and the missing ones above it, readable by their owner alone."""
    missing, parent = [], path
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    try:
        for folder in reversed(missing):
            os.mkdir(folder, 0o700)
    except OSError as error:
        raise UsageError(f"--slot-save-path: cannot create {error.filename}: {error.strerror}") from None
    if not os.path.isdir(path):
        raise UsageError(f"--slot-save-path: {path} is not a folder")


def run_tokenize(args: argparse.Namespace) -> int:
    """Text on stdin to ids on one line of stdout."""
    text = _read_text()
    import tokenizer

    try:
        model = tokenizer.Tokenizer.load(_model_path(args.model))
        for line in model.guesses:
            _log(f"strata: {line}")
        if args.chat:
            ids = model.encode_chat([{"role": "user", "content": text.removesuffix("\n").removesuffix("\r")}])
        else:
            ids = model.encode(text, bos=True)
    except tokenizer.TokenizerError as error:
        raise CommandError(str(error)) from error
    print(" ".join(map(str, ids)), flush=True)
    return EXIT_OK


def _read_text() -> str:
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"standard input is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}"
        ) from None


def run_detokenize(args: argparse.Namespace) -> int:
    """Lines on stdin to text on stdout, flushed line by line; exit 1 if an id was outside the vocabulary.

    The tokens of an answer (`T <id>`) come without control tokens, and `DONE` ends the last line of text; plain ids are
    shown whole, so that `tokenize --chat | detokenize` shows the rendered prompt.
    """
    import tokenizer

    try:
        model = tokenizer.Tokenizer.load(_model_path(args.model))
    except tokenizer.TokenizerError as error:
        raise CommandError(str(error)) from error
    decoder, exit_code = model.stream(), EXIT_OK
    for line in sys.stdin.buffer:
        answer = re.fullmatch(rb"T (\d+)\s*", line)
        if not answer and not re.fullmatch(rb"[\d,\s]*\d[\d,\s]*", line):
            _pass_on(line)
            if line.startswith(b"DONE"):
                _write_text(decoder.flush() + "\n")
            continue
        ids = [int(digits[:11]) for digits in re.findall(rb"\d+", line)]
        if max(ids) >= model.n_vocab:
            print(f"strata: id {max(ids)} is outside the vocabulary of {model.n_vocab}", file=sys.stderr)
            exit_code = EXIT_FAILED
            continue
        _write_text("".join(decoder.push(token_id, special=not answer) for token_id in ids))
    _write_text(decoder.flush())
    return exit_code


def _write_text(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _pass_on(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


def run_warmup(args: argparse.Namespace) -> int:
    """The kernels that an engine with this model runs, compiled and kept for the next one."""
    model = _model_path(args.model)
    import engine
    import warmup

    try:
        with _unwinding(), _compiling_progress() as compiled:
            filled = warmup.fill_cache(model, _log, compiled)
    except (engine.ModelError, warmup.CacheError) as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError(f"not enough memory for this model: {error}") from error
    what = f"{filled.n_compiled} kernels compiled" if filled.n_compiled else "no kernel had to be compiled"
    print(f"{what}, {filled.seconds:.1f} s; they are kept in {_printable(filled.folder)}", flush=True)
    return EXIT_OK


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command like an exception, so that its temporary files go with it."""
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _compiling_progress() -> Iterator[Callable[[int], None]]:
    """What counts kernels on stderr as they are compiled: a line that changes on a terminal, one line otherwise."""
    title = "compiling kernels, once for each installation"
    if not sys.stderr.isatty():
        yield lambda n_compiled: _log(title) if n_compiled == 1 else None
        return
    from rich import progress as parts
    from rich.console import Console

    columns = (parts.SpinnerColumn(), "{task.description}", "{task.completed}", parts.TimeElapsedColumn())
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(title, total=None)
        yield lambda n_compiled: line.update(task, completed=n_compiled)


def run_demo(args: argparse.Namespace) -> int:
    """A conversation that outlives its process, shown with a real model."""
    import demo

    try:
        with _unwinding():
            return EXIT_OK if demo.run(_model_path(args.model)) else EXIT_FAILED
    except demo.DemoError as error:
        raise CommandError(str(error)) from error


# --- Session files ---


def run_inspect(args: argparse.Namespace) -> int:
    """What is in each file; a file that cannot be read is told on stderr, or in its JSON object."""
    import sessionfile

    def look(path: str) -> None:
        info = sessionfile.inspect_session(path)
        if args.json:
            _print_json({"file": path, "ok": True} | info.as_dict())
        else:
            _print_info(info)

    return _each_file(args, look, sys.stderr)


def run_verify(args: argparse.Namespace) -> int:
    """Whether each file is sound in every byte; the verdicts are the results."""
    import sessionfile

    def look(path: str) -> None:
        with _reading_progress(path, quiet=args.quiet) as progress:
            info = sessionfile.verify_session(path, progress=progress)
        if args.json:
            _print_json({"file": path, "ok": True} | info.as_dict())
        else:
            proved = f"header hash, structure, payload hash {info.payload_hash:016x} and end marker agree"
            print(f"{_printable(path)}: sound. All {info.size_bytes} bytes were read; {proved}.", flush=True)

    return _each_file(args, look, sys.stdout)


def _each_file(args: argparse.Namespace, look: Callable[[str], None], refusals) -> int:
    """Call `look` with every file named; exit code 1 if any was refused."""
    import sessionfile

    exit_code = EXIT_OK
    for path in args.files:
        try:
            if path == "-":
                text = "standard input cannot be read by position; name a file (./- for one of this name)"
                raise sessionfile.SessionError("invalid", "not-regular", text)
            look(path)
        except sessionfile.SessionError as error:
            exit_code = EXIT_FAILED
            if args.json:
                names = ("kind", "reason", "section", "offset", "expected", "found")
                fields = {name: getattr(error, name) for name in names}
                _print_json({"file": path, "ok": False, "message": str(error)} | fields)
            else:
                print(f"{_printable(path)}: refused ({error.kind}): {error}", file=refusals, flush=True)
    return exit_code


def _print_json(value: dict) -> None:
    print(json.dumps(value), flush=True)


def _printable(name: str) -> str:
    """A file's name without characters that would move the cursor or cannot be encoded."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


def _local_time(modified_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(modified_s))


def _print_info(info) -> None:
    """An inspected file as a few lines and a table of its layers."""
    from rich.console import Console
    from rich.table import Table

    from sessionfile import STATE_ARRAYS

    image = info.image
    checkpoints = ", ".join(str(checkpoint.n_tokens) for checkpoint in image.checkpoints)
    state_parts = ", ".join(f"{name} {part.size}" for name, part in zip(STATE_ARRAYS, image.live.state, strict=True))
    lines = {
        "size": f"{info.size_bytes} bytes, changed {_local_time(info.modified_s)}",
        "model": f"{info.identity.model:016x}",
        "config": f"{info.identity.config:016x}",
        "payload hash": f"{info.payload_hash:016x} as stored; `strata session verify` proves it",
        "tokens": f"{image.live.n_tokens}, images {image.live.n_images}",
        "checkpoints": f"{len(image.checkpoints)}" + (f", of {checkpoints} tokens" if checkpoints else ""),
        "layers": f"{image.layer_lo} to {image.layer_hi}, control vector {'on' if image.cvec else 'off'}",
        "state": f"{info.state_bytes} bytes",
        "live state": state_parts,
        "K/V": f"{info.kv_bytes} bytes in {len(image.kv)} layers",
    } | ({"not listed": info.rest} if info.rest else {})
    print(_printable(info.path))
    for name, value in lines.items():
        print(f"  {name:<13} {value}")
    if image.kv:
        table = Table("layer", "format", "cells", "heads", "width", "pooled", "bytes", box=None, padding=(0, 0, 0, 2))
        for column in table.columns:
            column.justify, column.no_wrap = "right", True
        for i, layer in enumerate(image.kv):
            head = layer.header
            counts = (head.cells, head.heads, head.head_dim, head.pooled_rows, sum(layer.part_sizes))
            table.add_row(str(i), head.format_name, *map(str, counts))
        Console(highlight=False, width=max(80, shutil.get_terminal_size().columns)).print(table)
    sys.stdout.flush()


@contextlib.contextmanager
def _reading_progress(path: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """What reports a reading on stderr: a bar on a terminal, a line at every tenth of a large file otherwise."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _progress_lines(path)
    else:
        from rich import progress as bars
        from rich.console import Console

        columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
        name = bars.TextColumn("{task.description}", markup=False)
        with bars.Progress(name, *columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(_printable(os.path.basename(path)), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines(path: str) -> Callable[[int, int], None]:
    tenths = 0

    def report(done: int, total: int) -> None:
        nonlocal tenths
        if total >= LARGE_BYTES and 10 * done // total > tenths:
            tenths = 10 * done // total
            _log(f"{_printable(path)}: read {done} of {total} bytes")

    return report


def run_list(args: argparse.Namespace) -> int:
    """One line for each session file of a folder; exit code 1 if one of them has a damaged header."""
    import sessionfile

    try:
        entries = sessionfile.list_sessions(args.folder)
    except sessionfile.SessionError as error:
        raise CommandError(str(error)) from error
    for entry in entries:
        if args.json:
            _print_json(_entry_dict(entry))
        elif entry.refusal:
            print(f"{'-':>9} {'-':>13} {'-':>19}  {_printable(entry.name)}: refused: {entry.refusal}")
        else:
            time_text = _local_time(entry.modified_s)
            print(f"{entry.n_tokens:>9} {entry.size_bytes:>13} {time_text:>19}  {_printable(entry.name)}")
    sys.stdout.flush()
    return EXIT_FAILED if any(entry.refusal for entry in entries) else EXIT_OK


def _entry_dict(entry) -> dict:
    if entry.refusal:
        return {"file": entry.name, "ok": False, "kind": entry.refusal.kind, "message": str(entry.refusal)}
    identity = {name: f"{value:016x}" for name, value in entry.identity._asdict().items()}
    sizes = {"n_tokens": entry.n_tokens, "size_bytes": entry.size_bytes, "modified_s": entry.modified_s}
    return {"file": entry.name, "ok": True} | sizes | identity


if __name__ == "__main__":
    sys.exit(main())
