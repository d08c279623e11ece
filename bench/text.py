"""How long it takes to open a model file, to load its tokenizer, and to turn text into ids and back.

Usage: text.py --model PATH
"""

import argparse
import pathlib
import platform
import sys
import time
from collections.abc import Callable

import gguf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from declaration import TEXT
from modelfile import open_gguf
from tokenizer import Tokenizer

REPEATS = 3
TEXT_COPIES = 100


def best_s(work: Callable[[], object]) -> float:
    """The shortest of some runs: the others were disturbed."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    model = parser.parse_args().model
    tokenizer = Tokenizer.load(model)
    text = TEXT * TEXT_COPIES
    ids = tokenizer.encode(text)
    print(f"machine: {platform.machine()} python {platform.python_version()}")
    print(f"vocabulary: {tokenizer.n_vocab} tokens")
    print(f"open, the library's reader: {best_s(lambda: gguf.GGUFReader(model)):.2f} s")
    print(f"open, modelfile: {best_s(lambda: open_gguf(model)):.2f} s")
    print(f"load tokenizer: {best_s(lambda: Tokenizer.load(model)):.2f} s")
    print(f"encode: {len(text) / 1e6 / best_s(lambda: tokenizer.encode(text)):.2f} MB/s")
    print(f"decode: {len(ids) / 1e6 / best_s(lambda: tokenizer.decode(ids)):.2f} million tokens/s")


if __name__ == "__main__":
    main()
