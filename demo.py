"""The whole story in a minute: two conversations that nobody saves, and a process that is killed under them.

It owns the story and the comparison. Invariant: it reports success only where both conversations went on with all their
tokens, out of the store, and answered what an engine answers that was never killed. Read next: demostage.py for the
engines; demofiles.py for the story in which files are saved and restored.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import demostage
from declaration import TEXT
from demostage import ENGINE_COMMAND, WARM_UP_TOKENS, DemoError, EngineProcess, Stage, Turn, first_prompt, next_prompt
from storelayout import StoreError
from storeview import StoreView
from tokenizer import Tokenizer

QUESTIONS = (
    "What is this text, and who speaks in it? Answer in one sentence.",
    "Which complaints about the king does it list? Quote some of them.",
    "What do its authors ask for?",
)
ANSWER_TOKENS = 32
KILLED_AFTER = 4  # tokens of an answer
CONTEXT_MARGIN = 512  # room for the answers, the later questions and the template's marks
STORED_S, LOOK_S = 60, 0.05  # how long the store may take for what is small, and how often it is looked at


class Chat:
    """One conversation: its prompts follow from the answers."""

    def __init__(self, tokenizer: Tokenizer, text: str, most: int):
        self._tokenizer = tokenizer
        self.messages, self.prompt = first_prompt(tokenizer, text, QUESTIONS[0], most)
        self.turns: list[Turn] = []

    def ask(self, stage: Stage, engine: EngineProcess, title: str) -> Turn:
        """Take the next turn."""
        with stage.progress(title) as show:
            turn = engine.generate(self.prompt, ANSWER_TOKENS, show)
        self.turns.append(turn)
        if len(self.turns) < len(QUESTIONS):
            question = QUESTIONS[len(self.turns)]
            self.prompt = next_prompt(self._tokenizer, self.messages, self.prompt, turn.ids, question)
            said = self._tokenizer.decode(turn.ids, special=False)
            self.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        return turn


class Story(NamedTuple):
    """What the demo measured, of each chat: its turns, the last of them in another process, and those of a control."""

    chats: list[list[Turn]]
    control: list[list[Turn]]


def run(model: str, command: Sequence[str] = ENGINE_COMMAND, console: Console | None = None) -> bool:
    """Tell the story with a model file and return whether every promise in it held; raises DemoError."""
    return demostage.run(_tell, _report, model, command, console)


def _tell(tokenizer: Tokenizer, stage: Stage) -> Story:
    """Two chats in turn, a kill, two chats in turn."""
    store = ("--store", stage.folder, "--store-replay-s", "0")  # 0: nothing is read again, whatever that costs
    with stage.engine("Engine, to compile what is not in the cache yet") as engine, stage.progress("compiling") as show:
        most = engine.max_context - CONTEXT_MARGIN
        chats, control = ([Chat(tokenizer, text, most) for text in _halves()] for _ in range(2))
        engine.generate(chats[0].prompt[:WARM_UP_TOKENS], 4, show)

    with stage.engine("First engine, with a store", *store) as engine:
        for turn in range(2):
            for name, chat in zip("AB", chats, strict=True):
                done = chat.ask(stage, engine, f"chat {name}")
                stage.say(f"  chat {name}, turn {turn + 1}: {done.n_prompt_read:,} tokens read, {done.n_held:,} held")
        _wait_until_stored(stage.folder, [chat.turns[-1].n_held for chat in chats])
        engine.kill_in(chats[0].prompt, ANSWER_TOKENS, KILLED_AFTER)

    with stage.engine("Killed in the middle of an answer (SIGKILL). Second engine", *store) as engine:
        for name, chat in zip("AB", chats, strict=True):
            done = chat.ask(stage, engine, f"chat {name}")
            where = f"{done.n_reused:,} tokens reused ({done.source}), {done.n_prompt_read:,} read"
            stage.say(f"  chat {name} goes on after {done.first_token_s:.2f} s, {where}; it answers:")
            stage.console.print(f"  {tokenizer.decode(done.ids, special=False).strip()}", style="italic", markup=False)

    with stage.engine("Engine without a store, never killed, to compare with") as engine:
        for _ in QUESTIONS:
            for chat in control:
                chat.ask(stage, engine, "the same turns")
    return Story([chat.turns for chat in chats], [chat.turns for chat in control])


def _halves() -> tuple[str, str]:
    """The text of each chat."""
    paragraphs = TEXT.split("\n\n")
    middle = len(paragraphs) // 2
    return "\n\n".join(paragraphs[:middle]), "\n\n".join(paragraphs[middle:])


def _wait_until_stored(folder: str, n_tokens: list[int]) -> None:
    """Until the store has conversations of these lengths; nobody tells it to write."""
    view, end = StoreView(folder, lambda line: None), time.monotonic() + STORED_S
    try:
        while not set(n_tokens) <= {kept.n_tokens for kept in view.conversations()}:
            if time.monotonic() > end:
                raise DemoError(f"the store does not hold both conversations after {STORED_S} s")
            time.sleep(LOOK_S)
    except StoreError as error:
        raise DemoError(str(error)) from error


def _report(story: Story, console: Console) -> bool:
    """Print the comparison and return whether all promises held."""
    before, after = [turns[-2] for turns in story.chats], [turns[-1] for turns in story.chats]
    right = [turns[-1] for turns in story.control]
    table = Table(title="Two conversations, and a process that was killed under them")
    for column in ("", "chat A", "chat B"):
        table.add_column(column, justify="right" if column else "left")
    for title, values in {
        "tokens held before the kill": [f"{turn.n_held:,}" for turn in before],
        "tokens reused after it": [f"{turn.n_reused:,}" for turn in after],
        "tokens read after it": [f"{turn.n_prompt_read:,}" for turn in after],
        "seconds to the first token, when all was read": [f"{turns[0].first_token_s:.2f}" for turns in story.chats],
        "seconds to the first token after the kill": [f"{turn.first_token_s:.2f}" for turn in after],
    }.items():
        table.add_row(title, *values)
    console.print(table)
    n_tokens = sum(turn.n_held for turn in before)
    promises = {
        f"all {n_tokens:,} tokens held are used by a new process": all(
            one.n_held == other.n_reused > 0 for one, other in zip(before, after, strict=True)
        ),
        "they came from the store; nothing was saved and nothing restored by a command": all(
            turn.source == "store" for turn in after
        ),
        f"the next {len(after[0].ids)} greedy tokens of both equal those of an engine that was never killed": (
            [turn.ids for turn in after] == [turn.ids for turn in right]
        ),
        "both go on sooner than they were read": all(
            turns[-1].first_token_s < turns[0].first_token_s for turns in story.chats
        ),
    }
    if n_offered := sum(turn.n_drafts_offered for turn in right):
        drafts = [(turn.n_drafts_accepted, turn.n_drafts_offered) for turn in after]
        n_accepted = sum(turn.n_drafts_accepted for turn in after)
        promises[f"{n_accepted} of {n_offered} drafts are accepted after the kill, as without it"] = drafts == [
            (turn.n_drafts_accepted, turn.n_drafts_offered) for turn in right
        ]
    for promise, held in promises.items():
        console.print(f"[green]yes[/]  {promise}" if held else f"[red]NO[/]   {promise}")
    return all(promises.values())
