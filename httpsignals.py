"""Signals, heard by a thread of their own, so that a server ends whatever its loop, its threads and its child do.

Owns how a signal reaches Python and when patience ends. Refuses to know what ending means. Invariant: after the second
signal the process is gone within FORCED_AFTER_S, without the help of any other thread.

Read next: ``httpfront.py``, whose server is ended by this.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

# For the orderly way: a killed child, answers on their way, a last line in the log.
FORCED_AFTER_S = 1.5
EXIT_FORCED = 1


@contextlib.contextmanager
def heard_by_thread(numbers: tuple[int, ...], heard: Callable[[], None]) -> Iterator[None]:
    """Call ``heard`` for each of these signals, but for those that are ignored (as nohup leaves them).

    The main thread may be deep in a call; the C part of the interpreter writes each signal into a socket at once.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def read() -> None:
        with ours:
            while received := ours.recv(64):
                for number in received:
                    if number in caught:
                        heard()

    threading.Thread(target=read, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in caught}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        theirs.close()


class Patience:
    """What signals do: the first asks for an end in order, the second ends at once, if need be by force."""

    def __init__(self, ask: Callable[[], None], kill_child: Callable[[], None]):
        self._ask = ask
        self._kill_child = kill_child
        self._n_heard = 0

    def heard(self) -> None:
        self._n_heard += 1
        with contextlib.suppress(RuntimeError):  # the loop has ended: only the process is left to end
            self._ask()
        if self._n_heard > 1:
            self.leave_within(FORCED_AFTER_S)

    def leave_within(self, seconds: float) -> threading.Timer:
        """The process ends after so many seconds, unless it has ended by then or the timer is cancelled."""
        timer = threading.Timer(seconds, self._leave)
        timer.daemon = True
        timer.start()
        return timer

    def _leave(self) -> None:
        try:
            self._kill_child()
        finally:
            os._exit(EXIT_FORCED)
