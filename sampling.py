"""The choice of the next token from logits.

It owns penalties, filters and the random draw; it knows no model and no session. Invariant: a choice depends on the
logits, the tokens before it, the options and the position alone, so drafts, chunks and restarts cannot change it: the
random number of a position is computed from seed and position, never drawn from a running generator. Read next:
engine.py.
"""

import numpy as np

from verbs import SamplingOptions


class NotFinite(Exception):
    """Logits of which the greatest is no number: no token follows from them."""

    def __str__(self) -> str:
        return "the model's logits are not finite"


def next_token(logits: np.ndarray, context: np.ndarray, options: SamplingOptions, seed: int) -> int:
    """The token that follows `context` (int32, all tokens so far); logits float32 [V] may be mutated.

    Raises NotFinite where their greatest value is not a finite number.
    """
    if not np.isfinite(logits.max()):
        raise NotFinite
    if options.penalised and options.repeat_last_n:
        _penalise(logits, context[-options.repeat_last_n :], options)
    if options.temperature <= 0:
        return int(np.argmax(logits))
    candidates, weights = _filtered(logits, options)
    draw = np.random.Generator(np.random.Philox(key=seed, counter=len(context))).random()
    total = np.cumsum(weights)
    return int(candidates[min(np.searchsorted(total, draw * total[-1], side="right"), len(candidates) - 1)])


def _penalise(logits: np.ndarray, recent: np.ndarray, options: SamplingOptions) -> None:
    tokens, counts = np.unique(recent, return_counts=True)
    values = logits[tokens]
    values = np.where(values > 0, values / options.repeat_penalty, values * options.repeat_penalty)
    logits[tokens] = values - options.presence_penalty - options.frequency_penalty * counts


def _filtered(logits: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """Candidates in falling order of probability and their weights: top_k, then top_p, then min_p, then temperature.

    The filters look at probabilities before the temperature, so that a high temperature lets in no nonsense.
    """
    n_kept = options.top_k if 0 < options.top_k < len(logits) else len(logits)
    least = np.partition(logits, -n_kept)[-n_kept]
    candidates = np.flatnonzero(logits >= least)  # more than top_k where several are equal to the least
    candidates = candidates[np.argsort(-logits[candidates], kind="stable")][:n_kept]
    scores = logits[candidates].astype(np.float64)
    weights = np.exp(scores - scores[0])
    if options.top_p < 1:
        share = np.cumsum(weights) / weights.sum()
        n_kept = int(np.searchsorted(share, options.top_p)) + 1
        candidates, scores, weights = candidates[:n_kept], scores[:n_kept], weights[:n_kept]
    if options.min_p > 0:
        keep = weights >= options.min_p * weights[0]
        candidates, scores = candidates[keep], scores[keep]
    with np.errstate(over="ignore"):  # so small a temperature leaves the best token alone, as it should
        return candidates, np.exp((scores - scores[0]) / options.temperature)
