"""The command line: options, progress bars, exit codes; the one place that turns exceptions into messages.

It knows nothing of how anything works: every command imports the module that does it. Invariant: importing this file
needs options.py and the standard library alone, so that `--help` is instant and a man page can be made from it. Exit
codes: 0 done, 1 refused or failed, 2 wrong usage. Read next: options.py for what `--serve` takes, serveloop.py for what
it does, sessionfile.py for `session`.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import options
from options import EMBEDDED, VERSION

EXIT_OK, EXIT_FAILED = 0, 1  # argparse exits with 2 for wrong usage
LARGE_BYTES = 256 << 20  # a file below this is read before a line about it would be


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
    except (UsageError, options.OptionRefused) as error:
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
    if given := [*options.given_flags(args), *(["--config"] if args.config else [])]:
        raise UsageError(f"{', '.join(given)} before a command: these belong to --serve")
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
    parser.add_argument("--version", action="version", version=f"strata {VERSION}")
    parser.add_argument(
        "--serve", action="store_true", help="run the engine: verbs on stdin, answers on stdout, log on stderr"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON object with options of --serve, the same names with _ for -; an option given here as well wins",
    )
    options.add_arguments(parser)
    if commands:
        children = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="strata")
        for add in (_add_session, _add_store, _add_filters, _add_warmup, _add_demo):
            add(children)
    return parser


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


def _add_store(commands) -> None:
    store = commands.add_parser(
        "store", allow_abbrev=False, help="look into a conversation store, keep it small, and move conversations"
    )
    views = store.add_subparsers(dest="view", metavar="VIEW", required=True)
    for name, what in (
        ("list", "one line for each conversation kept in a folder: tokens, bytes, last use, first words"),
        ("verify", "read every byte of every file; exit 0 only if all are sound"),
        ("export", "write a conversation to a session file, as SAVE would"),
        ("import", "keep the conversation of a session file"),
        ("prune", "remove damaged files, and those that were used least of late, down to a size"),
    ):
        view = views.add_parser(name, allow_abbrev=False, help=what, description=f"{what[0].upper()}{what[1:]}.")
        view.add_argument("folder", metavar="DIR")
        if name == "export":
            view.add_argument("id", metavar="ID", help="of the conversation, as list shows it, or its first digits")
        if name in ("export", "import"):
            view.add_argument("file", metavar="FILE", help="session file")
        view.add_argument("--json", action="store_true", help="print one JSON object a line in place of text")
        if name in ("verify", "export", "import"):
            view.add_argument("--quiet", action="store_true", help="print nothing on stderr while reading")
        if name == "export":
            options.add_identity_arguments(view, "session_min_free_mib")
        if name == "import":
            options.add_identity_arguments(view, "session_min_free_mib", "store_mib")
        if name == "prune":
            view.add_argument("--store-mib", metavar="N", type=int, required=True, help="MiB that may stay")
        view.set_defaults(run=run_store)


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
        "demo", allow_abbrev=False, help="the whole story: two conversations, a kill, and both go on in a new process"
    )
    demo.add_argument("--model", metavar="PATH", help=f"GGUF file to run {EMBEDDED}")
    demo.add_argument("--files", action="store_true", help="the story of files: save, end, start again, restore, go on")
    demo.set_defaults(run=run_demo)


# --- Commands ---


def run_serve(args: argparse.Namespace) -> int:
    """The engine on stdin and stdout until QUIT or the end of input, or the HTTP front until a signal."""
    settings, front = options.read_options(args)
    settings = replace(settings, model=_model_path(settings.model))
    for flag, folder in (("--slot-save-path", settings.slot_save_path), ("--store", settings.store)):
        if folder is not None:
            _create_folder(flag, folder)
    if front.http is not None:
        if "--api-key" in options.given_flags(args):
            _log("--api-key stands in the list of processes; --api-key-file and STRATA_API_KEY do not")
        return _run_front(settings, front)
    import engine
    import serveloop

    try:
        return serveloop.serve_verbs(settings, sys.stdin.buffer, sys.stdout.buffer, _log)
    except engine.ModelError as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError(f"not enough memory for this model and context: {error}") from error


def _run_front(settings: options.EngineOptions, http: options.HttpOptions) -> int:
    """The HTTP front; its child is this program with the engine's options."""
    import httpfront

    front = httpfront.FrontOptions.from_flags(settings.model, settings.slot_save_path, http, settings.store)
    try:
        return httpfront.serve(front, [sys.executable, os.path.abspath(__file__), "--serve", *settings.flags()])
    except httpfront.FrontError as error:
        raise CommandError(str(error)) from error


def _model_path(named: str | None) -> str:
    """The model that was named, else the one that comes with the package."""
    if named:
        return named
    import modelfile

    try:
        return modelfile.embedded_model()
    except modelfile.GgufError as error:
        raise UsageError(str(error)) from error


def _one_line(error: Exception) -> str:
    from printable import one_line

    return one_line(str(error))


def _log(text: str) -> None:
    """A text on stderr; what models and files say in it moves no cursor."""
    from printable import one_line

    print("\n".join(map(one_line, text.split("\n"))), file=sys.stderr, flush=True)


def _create_folder(flag: str, path: str) -> None:
    """Make a folder for conversations, and the missing ones above it, readable by their owner alone."""
    missing, parent = [], path
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    try:
        for folder in reversed(missing):
            os.mkdir(folder, 0o700)
    except OSError as error:
        raise UsageError(f"{flag}: cannot create {error.filename}: {error.strerror}") from None
    if not os.path.isdir(path):
        raise UsageError(f"{flag}: {path} is not a folder")


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
    """Conversations that outlive their process, shown with a real model."""
    import demo
    import demofiles
    import demostage

    tell = demofiles.run if args.files else demo.run
    try:
        with _unwinding():
            return EXIT_OK if tell(_model_path(args.model)) else EXIT_FAILED
    except demostage.DemoError as error:
        raise CommandError(str(error)) from error


# --- Session files ---


def run_inspect(args: argparse.Namespace) -> int:
    """What is in each file; a file that cannot be read is told on stderr, or in its JSON object."""
    import sessionfile
    import sessioninfo

    def look(path: str) -> None:
        info = sessionfile.inspect_session(path)
        if args.json:
            _print_json({"file": path, "ok": True} | info.as_dict())
        else:
            sessioninfo.print_info(info, _printable(info.path))

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
    import sessionlayout

    exit_code = EXIT_OK
    for path in args.files:
        try:
            if path == "-":
                text = "standard input cannot be read by position; name a file (./- for one of this name)"
                raise sessionlayout.SessionError("invalid", "not-regular", text)
            look(path)
        except sessionlayout.SessionError as error:
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
    import sessionfolder
    import sessionlayout
    from printable import local_time

    try:
        entries = sessionfolder.list_sessions(args.folder)
    except sessionlayout.SessionError as error:
        raise CommandError(str(error)) from error
    for entry in entries:
        if args.json:
            _print_json(entry.as_dict())
        elif entry.refusal:
            print(f"{'-':>9} {'-':>13} {'-':>19}  {_printable(entry.name)}: refused: {entry.refusal}")
        else:
            time_text = local_time(entry.modified_s)
            print(f"{entry.n_tokens:>9} {entry.size_bytes:>13} {time_text:>19}  {_printable(entry.name)}")
    sys.stdout.flush()
    return EXIT_FAILED if any(entry.refusal for entry in entries) else EXIT_OK


def run_store(args: argparse.Namespace) -> int:
    """What is in a conversation store, whether it is sound, less of it, and conversations to and from files."""
    import storecommand

    try:
        if args.view in ("export", "import"):
            return _exchange(args)
        if args.view == "list":
            return EXIT_OK if storecommand.list_conversations(args.folder, as_json=args.json) else EXIT_FAILED
        if args.view == "verify":
            reporting = functools.partial(_reading_progress, quiet=args.quiet)
            sound = storecommand.verify_files(args.folder, as_json=args.json, reporting=reporting)
            return EXIT_OK if sound else EXIT_FAILED
        if args.store_mib < 0:
            raise UsageError("--store-mib is a count of MiB, 0 or more")
        storecommand.prune(args.folder, args.store_mib, as_json=args.json, log=_log)
    except storecommand.StoreError as error:
        raise CommandError(str(error)) from error
    return EXIT_OK


def _exchange(args: argparse.Namespace) -> int:
    """A conversation from a store to a session file, or the other way."""
    import storecommand

    if args.view == "export":
        storecommand.require_folder(args.folder)
    else:
        _create_folder("import", args.folder)
    import engine
    import sessionlayout
    import storeexchange

    settings = options.read_identity_options(
        args, store=os.path.realpath(args.folder), conversation_cache_min_free_mib=0
    )
    settings = replace(settings, model=_model_path(settings.model))
    try:
        with _unwinding(), _reading_progress(args.file, quiet=args.quiet) as progress:
            if args.view == "export":
                done = storeexchange.export_conversation(settings, args.id, args.file, _log, progress)
                facts = {"file": args.file, "n_tokens": done.n_tokens, "size_bytes": done.size_bytes}
                text = f"{done.n_tokens} tokens, {done.size_bytes} bytes"
            else:
                kept = storeexchange.import_session(settings, args.file, _labels(settings.model), _log, progress)
                facts = {"file": args.file, "id": kept.id, "n_tokens": kept.n_tokens}
                text = f"kept as {kept.id}, a conversation of {kept.n_tokens} tokens"
    except (engine.ModelError, engine.FatalError, sessionlayout.SessionError) as error:
        raise CommandError(str(error)) from error
    except MemoryError as error:
        raise CommandError(f"not enough memory for this conversation: {error}") from error
    print(json.dumps(facts) if args.json else _printable(f"{args.file}: {text}"), flush=True)
    return EXIT_OK


def _labels(model: str) -> Callable[[list[int]], str]:
    """What gives the first words of a conversation from its tokens: "" where a model has no text."""
    import httpconversation
    import tokenizer

    try:
        return functools.partial(httpconversation.first_words_of, tokenizer=tokenizer.Tokenizer.load(model))
    except tokenizer.TokenizerError as error:
        _log(f"a conversation is kept without its first words: {error}")
        return lambda ids: ""


if __name__ == "__main__":
    sys.exit(main())
