"""Command lines and requests for `strata --serve` as a process of its own."""

import pathlib
import sys

from given_engine import MODELS

STRATA = pathlib.Path(__file__).parent.parent / "strata.py"
QUICK = ["--backend=cpu", "--threads=1", "--session-min-free-mib=0", "--conversation-cache-min-free-mib=0"]
PATIENCE_S = 600  # after a change of the kernels the first process waits for the compiler


def command(model: str, folder, *flags: str) -> list[str]:
    files = [f"--model={MODELS / model}.gguf", f"--slot-save-path={folder}"]
    context = [] if any(flag.startswith("--max-context") for flag in flags) else ["--max-context=256"]
    return [sys.executable, str(STRATA), "--serve", *files, *QUICK, *context, *flags]


def gen(prompt, max_new: int = 16, options: str = "") -> str:
    return f"GEN {max_new} {options}{','.join(map(str, prompt))}\n"
