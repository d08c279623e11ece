"""A demo whose engine is a script with one fault, and what it printed."""

import io
import sys
from collections.abc import Callable

from rich.console import Console

from given_tokenizer import write_model


def telling(story, folder, engine: str, *arguments: str) -> Callable[..., tuple[bool, str]]:
    """What tells a story with such an engine: it takes the fault, and returns whether all promises held, and the text.

    The engine is Python, and gets the fault and then the arguments; further words are metadata of the model.
    """
    script = folder / "engine.py"
    script.write_text(engine)

    def run(fault: str, **metadata) -> tuple[bool, str]:
        console = Console(file=io.StringIO(), width=120)
        model = write_model(folder / "model.gguf", **metadata)
        told = story.run(model, [sys.executable, str(script), fault, *arguments], console)
        return told, console.file.getvalue()

    return run


def broken(printed: str) -> list[str]:
    """The promises that did not hold."""
    return [line for line in printed.splitlines() if line.startswith("NO")]
