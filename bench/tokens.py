"""How fast prompts are read and tokens decoded, and what int8 activations cost in perplexity.

Rates are medians, one stream, greedy; perplexity is that of the demo's text. Usage: tokens.py --model PATH [--rounds N]
"""

import argparse
import pathlib
import platform
import statistics
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from declaration import TEXT
from engine import Engine, EngineOptions, GenRequest, Session
from tokenizer import Tokenizer

PROMPTS = (512, 2048)
DECODED = 64
CHUNK = 256
CONTEXT = 4096


def load(model: str, activations: str) -> Engine:
    options = EngineOptions(
        model=model, activations=activations, max_context=CONTEXT, conversation_cache_min_free_mib=0, backend="cpu"
    )
    return Engine.load(options)


def rates(session: Session, prompt: np.ndarray, rounds: int) -> tuple[float, float]:
    """Tokens a second of reading the prompt and of decoding behind it."""
    read, decoded = [], []
    for _ in range(rounds):
        session.erase()
        done = list(session.generate(GenRequest(prompt, DECODED)))[-1]
        read.append(len(prompt) / done.prompt_ms * 1e3)
        decoded.append(done.generated / done.decode_ms * 1e3)
    return statistics.median(read), statistics.median(decoded)


def perplexity(engine: Engine, ids: np.ndarray) -> float:
    """e to the mean negative log-likelihood of every token after the first."""
    cache, total = engine.new_cache(), 0.0
    for first in range(0, len(ids) - 1, CHUNK):
        part, following = ids[first : first + CHUNK], ids[first + 1 : first + CHUNK + 1]
        logits = engine.model.logits(engine.model.append(cache, part).residual)[: len(following)].astype(np.float64)
        peak = logits.max(axis=1, keepdims=True)
        log_sum = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
        total += float((log_sum - logits[np.arange(len(following)), following]).sum())
    return float(np.exp(total / (len(ids) - 1)))


def main() -> None:
    """Print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ids = np.array(Tokenizer.load(args.model).encode(TEXT), np.int32)
    print(f"machine: {platform.machine()} python {platform.python_version()}")
    for activations in ("int8", "float"):
        engine = load(args.model, activations)
        session = Session(engine)
        session.warm_up()
        for length in PROMPTS:
            prompt = np.resize(ids, length)
            read, decoded = rates(session, prompt, args.rounds)
            print(f"{activations} activations, prompt of {length}: {read:.0f} tokens/s")
            print(f"{activations} activations, decode behind it: {decoded:.1f} tokens/s")
        print(f"{activations} activations, perplexity of the text: {perplexity(engine, ids[:CONTEXT]):.3f}")


if __name__ == "__main__":
    main()
