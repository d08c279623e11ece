"""The story of files: a long prompt is read and saved, the process ends, a new one restores it and takes the next turn.

It owns the story and the comparison. Invariant: it reports success only where the restored conversation was used in
full and went on with the very tokens of one that never stopped. Read next: demostage.py for the engines; demo.py for
the story in which nothing is saved.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import demostage
from declaration import TEXT
from demostage import ENGINE_COMMAND, WARM_UP_TOKENS, Stage, Transfer, Turn, first_prompt, next_prompt
from tokenizer import Tokenizer

FIRST_QUESTION = "What is this text, and who speaks in it? Answer in one sentence."
NEXT_QUESTION = "Which complaints about the king does it list? Quote some of them."
ANSWER_TOKENS = 48
NEXT_TOKENS = 32
CONTEXT_MARGIN = 256  # room for both answers, the second question and the template's marks


class Story(NamedTuple):
    """What the demo measured."""

    cold: Turn
    saved: Transfer
    restored: Transfer
    never_stopped: Turn
    after_restart: Turn


def run(model: str, command: Sequence[str] = ENGINE_COMMAND, console: Console | None = None) -> bool:
    """Tell the story with a model file and return whether every promise in it held; raises DemoError."""
    return demostage.run(_tell, _report, model, command, console)


def _tell(tokenizer: Tokenizer, stage: Stage) -> Story:
    """Read, answer, save, end; start again, restore, go on."""
    files, title = ("--slot-save-path", stage.folder), "Engine, to compile what is not in the cache yet"
    with stage.engine(title, *files) as engine, stage.progress("compiling") as show:
        messages, prompt = first_prompt(tokenizer, TEXT, FIRST_QUESTION, engine.max_context - CONTEXT_MARGIN)
        engine.generate(prompt[:WARM_UP_TOKENS], 4, show)
        engine.transfer("SAVE", "warm-up.bin", show)
        engine.transfer("RESTORE", "warm-up.bin", show)

    with stage.engine("First engine", *files) as engine:
        with stage.progress(f"reading {len(prompt):,} tokens") as show:
            cold = engine.generate(prompt, ANSWER_TOKENS, show)
        answer = tokenizer.decode(cold.ids, special=False)
        stage.say(f"  read {cold.n_prompt_read:,} tokens, first token after {cold.first_token_s:.2f} s; it answers:")
        stage.console.print(f"  {answer.strip()}", style="italic", markup=False)
        with stage.progress("saving") as show:
            saved = engine.transfer("SAVE", "conversation.bin", show)
        stage.say(f"  saved {saved.n_tokens:,} tokens in {saved.seconds:.2f} s, {saved.size_bytes / 1e6:.1f} MB")
        following = next_prompt(tokenizer, messages, prompt, cold.ids, NEXT_QUESTION)
        with stage.progress("next turn, without a stop, to compare with") as show:
            never_stopped = engine.generate(following, NEXT_TOKENS, show)

    with stage.engine("First engine ended. Second engine", *files) as engine:
        with stage.progress("restoring") as show:
            restored = engine.transfer("RESTORE", "conversation.bin", show)
        with stage.progress("next turn") as show:
            after_restart = engine.generate(following, NEXT_TOKENS, show)
        stage.say("  it goes on:")
        stage.console.print(
            f"  {tokenizer.decode(after_restart.ids, special=False).strip()}", style="italic", markup=False
        )
    return Story(cold, saved, restored, never_stopped, after_restart)


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
        promises[f"{shown} are accepted after the restart, as without it"] = (
            (before.n_drafts_accepted, before.n_drafts_offered) == (after.n_drafts_accepted, after.n_drafts_offered)
        )
    for promise, held in promises.items():
        console.print(f"[green]yes[/]  {promise}" if held else f"[red]NO[/]   {promise}")
    return all(promises.values())
