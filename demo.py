"""The whole story in a minute: a conversation that outlives its process, shown with a real model and a real text.

It owns the story and the comparison; it knows the engine only as a child process that answers verbs. Invariant: it
reports success only where the restored conversation was used in full and went on with the very tokens of one that never
stopped. Read next: strata.py, which starts it; verbs.py for the lines.
"""

import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import verbs
from declaration import TEXT
from tokenizer import Tokenizer, TokenizerError

ENGINE_COMMAND = (sys.executable, str(pathlib.Path(__file__).with_name("strata.py")), "--serve")
FIRST_QUESTION = "What is this text, and who speaks in it? Answer in one sentence."
NEXT_QUESTION = "Which complaints about the king does it list? Quote some of them."
ANSWER_TOKENS = 48
NEXT_TOKENS = 32
WARM_UP_TOKENS = 256  # enough to run, and so to compile, all that a long prompt runs
CONTEXT_MARGIN = 256  # room for both answers, the second question and the template's marks
END_GRACE_S = 30

Show = Callable[[int, int], None]  # progress: done, total


class DemoError(Exception):
    """The story cannot be told: the engine or the model does not do its part; one line."""


class Turn(NamedTuple):
    """One answered prompt."""

    ids: list[int]
    n_reused: int
    n_prompt_read: int
    first_token_s: float
    n_drafts_accepted: int
    n_drafts_offered: int


class Transfer(NamedTuple):
    """One SAVE or RESTORE."""

    n_tokens: int
    size_bytes: int
    seconds: float


class Story(NamedTuple):
    """What the demo measured."""

    cold: Turn
    saved: Transfer
    restored: Transfer
    never_stopped: Turn
    after_restart: Turn


def run(model: str, command: Sequence[str] = ENGINE_COMMAND, console: Console | None = None) -> bool:
    """Tell the story with a model file and return whether every promise in it held; raises DemoError."""
    console = console or Console(highlight=False)
    try:
        tokenizer = Tokenizer.load(model)
        with tempfile.TemporaryDirectory(prefix="strata-demo-") as folder:
            story = _tell(tokenizer, _Stage([*command, "--model", model], folder, console))
    except TokenizerError as error:
        raise DemoError(str(error)) from error
    return _report(story, console)


class _Stage:
    """Where the story is told: how engines are started, where files go, where lines are printed."""

    def __init__(self, command: Sequence[str], folder: str, console: Console):
        no_reserves = ("--session-min-free-mib", "0", "--conversation-cache-min-free-mib", "0")
        self._command = [*command, "--slot-save-path", folder, *no_reserves]
        self._log_path = pathlib.Path(folder, "engine.log")
        self.console = console

    @contextmanager
    def engine(self, title: str) -> Iterator["EngineProcess"]:
        """A running engine that is ended behind the block."""
        start = time.perf_counter()
        with open(self._log_path, "wb") as log, EngineProcess(self._command, log) as engine:
            self.say(f"[bold]{title}[/]: ready after {time.perf_counter() - start:.1f} s")
            yield engine

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def progress(self, title: str) -> Iterator[Show]:
        """A progress bar on a terminal, nothing elsewhere."""
        if not self.console.is_terminal:
            yield lambda done, total: None
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(title, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)


def _tell(tokenizer: Tokenizer, stage: _Stage) -> Story:
    """Read, answer, save, end; start again, restore, go on."""
    with stage.engine("Engine, to compile what is not in the cache yet") as engine, stage.progress("compiling") as show:
        messages, prompt = _first_prompt(tokenizer, engine.max_context)
        engine.generate(prompt[:WARM_UP_TOKENS], 4, show)
        engine.transfer("SAVE", "warm-up.bin", show)
        engine.transfer("RESTORE", "warm-up.bin", show)

    with stage.engine("First engine") as engine:
        with stage.progress(f"reading {len(prompt):,} tokens") as show:
            cold = engine.generate(prompt, ANSWER_TOKENS, show)
        answer = tokenizer.decode(cold.ids, special=False)
        stage.say(f"  read {cold.n_prompt_read:,} tokens, first token after {cold.first_token_s:.2f} s; it answers:")
        stage.console.print(f"  {answer.strip()}", style="italic", markup=False)
        with stage.progress("saving") as show:
            saved = engine.transfer("SAVE", "conversation.bin", show)
        stage.say(f"  saved {saved.n_tokens:,} tokens in {saved.seconds:.2f} s, {saved.size_bytes / 1e6:.1f} MB")
        next_prompt = _next_prompt(tokenizer, messages, prompt, cold.ids)
        with stage.progress("next turn, without a stop, to compare with") as show:
            never_stopped = engine.generate(next_prompt, NEXT_TOKENS, show)

    with stage.engine("First engine ended. Second engine") as engine:
        with stage.progress("restoring") as show:
            restored = engine.transfer("RESTORE", "conversation.bin", show)
        with stage.progress("next turn") as show:
            after_restart = engine.generate(next_prompt, NEXT_TOKENS, show)
        stage.say("  it goes on:")
        stage.console.print(
            f"  {tokenizer.decode(after_restart.ids, special=False).strip()}", style="italic", markup=False
        )
    return Story(cold, saved, restored, never_stopped, after_restart)


def _first_prompt(tokenizer: Tokenizer, max_context: int) -> tuple[list[dict], list[int]]:
    """The first message and its ids; the text is cut after a paragraph where the context is small."""
    paragraphs = TEXT.split("\n\n")
    while paragraphs:
        content = "\n\n".join(["Read this text.", *paragraphs, FIRST_QUESTION])
        messages = [{"role": "user", "content": content}]
        ids = tokenizer.encode_chat(messages)
        if len(ids) + CONTEXT_MARGIN <= max_context:
            return messages, ids
        paragraphs.pop()
    raise DemoError(f"a context of {max_context} is too small for the story: it needs {2 * CONTEXT_MARGIN}")


def _next_prompt(tokenizer: Tokenizer, messages: list[dict], prompt: list[int], answer: list[int]) -> list[int]:
    """The ids so far, and the second question behind them.

    The answer's own ids are kept: to encode its text again could give others, and the conversation would not match.
    """
    ended = answer[-1:] if answer[-1] in tokenizer.end_ids else []
    text = tokenizer.decode(answer[: len(answer) - len(ended)])
    turns = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": NEXT_QUESTION}]
    before, whole = tokenizer.render_chat(messages) + text, tokenizer.render_chat(turns)
    if not whole.startswith(before):
        raise DemoError("this model's chat template rewrites earlier answers, so no prompt continues what was held")
    rest = tokenizer.encode(whole[len(before) :], special=True)
    return prompt + answer + (rest[1:] if rest[:1] == ended else rest)


def _report(story: Story, console: Console) -> bool:
    """Print the comparison and return whether all promises held."""
    cold_s = story.cold.first_token_s
    restored_s = story.restored.seconds + story.after_restart.first_token_s
    table = Table(title="A long prompt, and the next turn after a restart")
    for column in ("", "read cold", "restored"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("tokens read", f"{story.cold.n_prompt_read:,}", f"{story.after_restart.n_prompt_read:,}")
    table.add_row("tokens reused", f"{story.cold.n_reused:,}", f"{story.after_restart.n_reused:,}")
    table.add_row("seconds to the first token", f"{cold_s:.2f}", f"{restored_s:.2f}")
    table.add_row("  of these, RESTORE", "", f"{story.restored.seconds:.2f}")
    console.print(table)
    n_equal, before, after = len(story.never_stopped.ids), story.never_stopped, story.after_restart
    promises = {
        f"{cold_s / restored_s:.0f} times sooner after a restart than cold": restored_s < cold_s,
        f"all {story.saved.n_tokens:,} saved tokens restored and used": (
            story.saved.n_tokens == story.restored.n_tokens == story.after_restart.n_reused
        ),
        f"the next {n_equal} greedy tokens equal those of the engine that never stopped": (
            story.after_restart.ids == story.never_stopped.ids
        ),
    }
    if before.n_drafts_offered:
        shown = f"{after.n_drafts_accepted} of {after.n_drafts_offered} drafts"
        promises[f"{shown} are accepted after the restart, as without it"] = before[-2:] == after[-2:]
    for promise, held in promises.items():
        console.print(f"[green]yes[/]  {promise}" if held else f"[red]NO[/]   {promise}")
    return all(promises.values())


class EngineProcess:
    """A child that runs `strata --serve`: verbs go in, answer lines come out; its log goes to a file."""

    def __init__(self, command: Sequence[str], log):
        self._log = log
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, encoding="utf-8", bufsize=1
        )
        try:
            self.max_context = next(self._answers(verbs.Ready)).n_ctx
        except BaseException:
            self._end(kill=True)
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, failure, *_) -> None:
        self._end(kill=failure is not None)

    def generate(self, ids: Sequence[int], max_new: int, show: Show) -> Turn:
        """Send a greedy GEN and read its answer."""
        start, first_token_s, tokens = time.perf_counter(), 0.0, []
        self._send(verbs.gen_line(max_new, ids))
        for said in self._answers(verbs.Done, verbs.Token, verbs.PromptProgress):
            match said:
                case verbs.PromptProgress(position, n_prompt):
                    show(position, n_prompt)
                case verbs.Token(token):
                    first_token_s = first_token_s or time.perf_counter() - start
                    tokens.append(token)
        if not tokens:
            raise DemoError("the engine answered without a token")
        drafts = said.n_drafts_accepted, said.n_drafts_offered
        return Turn(tokens, said.n_reused, said.n_prompt_read, first_token_s, *drafts)

    def transfer(self, verb: str, name: str, show: Show) -> Transfer:
        """SAVE or RESTORE a file of the engine's folder."""
        start = time.perf_counter()
        self._send(f"{verb} {name}")
        for said in self._answers(verbs.TRANSFERS[verb], verbs.Moved):
            if isinstance(said, verbs.Moved):
                show(*said)
        return Transfer(said.n_tokens, said.size_bytes, time.perf_counter() - start)

    def _send(self, line: str) -> None:
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._failure("the engine ended") from None

    def _answers(self, last: type, *wanted: type) -> Iterator:
        """The wanted records up to and with the last one; raises DemoError for a refusal or the end."""
        for line in map(str.strip, self._child.stdout):
            kind = verbs.kind_of(line)
            if kind in (verbs.Refusal, verbs.SessionRefusal, verbs.Fatal):
                raise DemoError(f"the engine answered: {line}")
            try:
                said = verbs.read(line, kind) if kind in (last, *wanted) else None
            except ValueError as error:
                raise DemoError(f"the engine is out of step: {line[:200]!r}: {error}") from error
            if said:
                yield said
            if kind is last:
                return
        raise self._failure("the engine ended")

    def _failure(self, what: str) -> DemoError:
        """An error with the last line of the engine's log."""
        code = self._child.wait()
        lines = pathlib.Path(self._log.name).read_text(errors="replace").splitlines()
        return DemoError(f"{what} with exit code {code}; its log ends: {lines[-1] if lines else '(nothing)'}")

    def _end(self, *, kill: bool) -> None:
        """Close stdin, which ends the engine, and wait for it."""
        if kill:
            self._child.kill()
        try:
            self._child.communicate(timeout=END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
        if not kill and self._child.returncode != 0:
            raise self._failure("the engine ended")
