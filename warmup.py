"""The kernel cache filled ahead of the first start, so that an engine is ready as soon as its weights are read.

It owns what has to run for that and the account of what was compiled; it knows no verbs and prints nothing. Invariant:
it ends well only where another process will find what was compiled. Read next: kernelcache.py, which names the folder;
engine.py, whose `Session.warm_up` runs the kernels.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba.core import event

from engine import Engine, Session
from jit import KERNELS
from options import EngineOptions
from sessionlayout import SessionError
from verbs import GenRequest


class CacheError(Exception):
    """Kernels that are compiled now would be lost with this process; one line."""


class Filled(NamedTuple):
    """What one warm-up did."""

    n_compiled: int  # 0 where all was in the cache
    seconds: float
    folder: str


def fill_cache(model: str, log: Callable[[str], None], compiled: Callable[[int], None]) -> Filled:
    """Compile what an engine with this model runs; `compiled` is told the count with each kernel.

    Raises CacheError, where it can before anything is compiled, or engine.ModelError.
    """
    _require_kept()
    started, counter = time.perf_counter(), _Counter(compiled)
    with event.install_listener("numba:compile", counter):
        session = Session(
            Engine.load(EngineOptions(model=model, session_min_free_mib=0, conversation_cache_min_free_mib=0), log)
        )
        session.warm_up()
        _converse(session)
        session.close()
    _require_kept()
    return Filled(counter.n_compiled, time.perf_counter() - started, KERNELS.path)


def _require_kept() -> None:
    if KERNELS.failure:
        raise CacheError(KERNELS.failure)


def _converse(session: Session) -> None:
    """A conversation of a few tokens that is saved and restored: the fingerprints and checksums have kernels too."""
    for _ in session.generate(GenRequest(np.zeros(2, np.int32), 2)):
        pass
    try:
        # Beside the kernels: what a killed process leaves there goes with the next one that compiles.
        with tempfile.TemporaryDirectory(prefix="warm-up-", suffix=".tmp", dir=KERNELS.path) as folder:
            path = os.path.join(folder, "session.bin")
            session.save(path)
            session.restore(path)
    except (SessionError, OSError) as error:
        raise CacheError(f"a session file cannot be written for a trial: {error}") from error


class _Counter(event.Listener):
    """Counts compilations; what is loaded from the cache is none."""

    def __init__(self, compiled: Callable[[int], None]):
        self.n_compiled = 0
        self._compiled = compiled

    def on_start(self, event) -> None:
        """Nothing: a compilation counts at its end."""

    def on_end(self, event) -> None:
        self.n_compiled += 1
        self._compiled(self.n_compiled)
