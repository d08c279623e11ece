"""A thread beside the caller that carries out calls in order.

It owns its start and its end; it knows nothing of what it calls. Python's own `Thread.start` waits for ever where the
new thread dies for lack of memory before it has run a line. Invariant: a helper that was made runs already, and one
that does not come is told like any other lack of memory. Read next: blockfile.py, which reads and writes with it.
"""

import _thread
import errno
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

START_S = 5.0  # within which a thread has begun on any machine that still gets on


class HelperThread:
    """One thread; as a context manager it ends with the block, when it has done what it was given."""

    def __init__(self):
        """Raises OSError ENOMEM where there is no thread to be had."""
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._begun, self._ended = threading.Event(), threading.Event()
        self._given_up = False
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"{error}: the limit of threads or of memory is reached") from error
        if not self._begun.wait(START_S):
            self._given_up = True  # should it come after all, it goes at once
            raise OSError(errno.ENOMEM, "a helper thread did not start: the limit of memory is reached")

    def submit(self, call: Callable, *arguments) -> Future:
        """Have a call carried out behind those before it; what it returns or raises is in the future."""
        future: Future = Future()
        self._calls.put((future, call, arguments))
        return future

    def finish(self) -> None:
        """Have it end when it has done what it was given."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait until it has ended."""
        self._ended.wait()

    def __enter__(self) -> "HelperThread":
        return self

    def __exit__(self, *exception) -> None:
        self.finish()
        self.join()

    def _run(self) -> None:
        self._begun.set()
        try:
            while not self._given_up and (work := self._calls.get()) is not None:
                self._carry_out(*work)
        finally:
            self._ended.set()

    @staticmethod
    def _carry_out(future: Future, call: Callable, arguments: tuple) -> None:
        try:
            result = call(*arguments)
        except BaseException as error:  # handed over: whoever asks for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)
