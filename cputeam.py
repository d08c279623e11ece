"""A team of compute threads that share out the jobs of one operation.

It owns the threads, the word by which they claim jobs and the wait for the last one; it knows no operation: an
operation puts the address of a function into the control array, with its arguments, arrays by address, and whoever
claims a job calls it. The caller works too and takes whatever nobody else has taken, so on a busy machine an operation
waits for no thread that is not running, but for one that holds a job. Where such waits come again and again, one helper
after the other is sent to sleep for a while, so that the threads that are left have a core each. Invariant: a helper
touches an operation's arguments only between claiming one of its jobs and counting it as done, and the caller returns
only when all are done; how the work is cut, and who does it, never changes a result. Read next: cpuproducts.py.

The word packs (turn, number of jobs, next job), 24 + 20 + 20 bits, so that a claim and the check that the operation is
still the same are one compare-and-swap.
"""

import os
import threading
import time

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from jit import cfunc, njit

# Slots of the control array, a cache line (8 words) apart where different threads write them.
TURN, DONE, PARKED, END, CALLED, HELPERS, OPERATION, ARGUMENTS = 0, 8, 16, 24, 25, 32, 33, 34
CLOCK, AWAY, RETURN_AT, RETURNED, STEP = 96, 98, 99, 100, 101  # the caller's own; two words of room for the clock
CONTROL_WORDS = 104
SPINS = 200_000  # polls of the word before a helper sleeps: longer than the gap between two operations of a token
# A helper that was waited for long has lost its core to another program. When that comes again soon, it is sent away
# for twice as long as it was waited for, then for four times, and so on: a single loss costs no more than itself, and a
# core that stays taken is asked for again as often as costs a few per cent.
LOST_NS = 300_000  # a wait that is longer than two jobs of the operation by this much
SOON = 16  # times the wait
MOST_STEPS = 4
MOST_AWAY_NS = 250_000_000


def _slot(context, builder, signature, args):
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def load_word(typingctx, control, slot):
    """An atomic read of control[slot]."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_slot(context, builder, signature, args), "acquire", 8)

    return types.int64(control, types.intp), codegen


@intrinsic
def store_word(typingctx, control, slot, value):
    """An atomic write of control[slot], after everything written before it."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[2], _slot(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(control, types.intp, types.int64), codegen


@intrinsic
def add_word(typingctx, control, slot, value):
    """An atomic addition to control[slot]."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _slot(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(control, types.intp, types.int64), codegen


@intrinsic
def swap_word(typingctx, control, slot, expected, value):
    """Set control[slot] to `value` if it is `expected`; whether it was."""

    def codegen(context, builder, signature, args):
        address = _slot(context, builder, signature, args)
        result = builder.cmpxchg(address, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(control, types.intp, types.int64, types.int64), codegen


@intrinsic
def pointer_to(typingctx, address):
    """The void pointer that an integer address stands for; `carray` makes an array of it."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def call_job(typingctx, address, control, job):
    """Call the compiled function of a `Job` by its address."""

    def codegen(context, builder, signature, args):
        words = context.make_array(signature.args[1])(context, builder, args[1]).data
        function_type = ir.FunctionType(ir.VoidType(), [words.type, ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [words, args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, control, types.int64), codegen


class Job:
    """A function (control, number of the job) that threads call by address.

    `control` comes as a pointer; `control_array` makes the array of it. Compiled when first asked for, kept on disk.
    """

    def __init__(self, function):
        self._function, self._compiled = function, None

    @property
    def address(self) -> int:
        if self._compiled is None:
            self._compiled = cfunc(types.void(types.CPointer(types.int64), types.int64))(self._function)
        return self._compiled.address


@njit
def control_array(control):
    """The control array that a job is given the address of."""
    return carray(control, (CONTROL_WORDS,))


# Windows has no such call; there a spinning caller loses its core at the end of its time slice.
if hasattr(os, "sched_yield"):
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @njit
    def _yield_core():
        _sched_yield()

else:

    @njit
    def _yield_core():
        pass


@njit
def open_jobs(control, n_jobs):
    """Offer jobs 0..n_jobs - 1 of the operation whose code and arguments were just put into `control`."""
    turn = ((load_word(control, TURN) >> 40) + 1) & 0xFFFFFF
    store_word(control, DONE, 0)
    store_word(control, TURN, turn << 40 | n_jobs << 20)


@njit
def claim_job(control):
    """The next job of the present operation, or -1 when all are taken."""
    while True:
        word = load_word(control, TURN)
        job = word & 0xFFFFF
        if job >= word >> 20 & 0xFFFFF:
            return -1
        if swap_word(control, TURN, word, word + 1):
            return job


@njit
def finish_job(control):
    """Count a claimed job as done."""
    add_word(control, DONE, 1)


# Nor has it this clock: there no helper is sent away.
if hasattr(time, "CLOCK_MONOTONIC") and os.name == "posix":
    _clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
    _MONOTONIC = time.CLOCK_MONOTONIC

    @njit
    def _now(control):
        """Nanoseconds; takes some 30."""
        _clock_gettime(_MONOTONIC, control.ctypes.data + CLOCK * 8)
        return control[CLOCK] * 1_000_000_000 + control[CLOCK + 1]

else:

    @njit
    def _now(control):
        return 0


@njit
def wait_for_jobs(control, n_jobs, began, n_own):
    """Return when every job is done; those not yet done are in the hands of helpers.

    The caller did `n_own` jobs from `began` on, so what a job takes is known.
    """
    looks, ended = 0, 0
    while load_word(control, DONE) < n_jobs:
        looks += 1
        if looks == SPINS:
            ended = _now(control)
        if looks > SPINS:  # the helper lost its core: let it have this one
            _yield_core()
    if looks > SPINS:
        now = _now(control)
        if now - ended > LOST_NS + 2 * (ended - began) // max(1, n_own):
            _send_away(control, now, now - ended)


@njit
def _send_away(control, now, waited):
    """Have one helper less, as `waited` ns were lost to one, and not for the first time."""
    if now - control[RETURNED] >= SOON * waited:
        control[STEP], control[RETURNED] = 0, now
        return
    control[STEP] = min(MOST_STEPS, control[STEP] + 1)
    control[AWAY] = min(MOST_AWAY_NS, waited << control[STEP])
    control[RETURN_AT] = now + control[AWAY]
    store_word(control, CALLED, max(0, control[CALLED] - 1))


@njit
def _call_back(control, now):
    """Have one helper more, whom the next `Team.wake` wakes."""
    control[RETURNED], control[RETURN_AT] = now, now + control[AWAY]
    store_word(control, CALLED, control[CALLED] + 1)


@njit
def await_jobs(control, helper):
    """Spin until jobs are open to this helper (True), or until it is time to sleep or to end (False)."""
    for _ in range(SPINS):
        if load_word(control, CALLED) <= helper or load_word(control, END):
            return False
        word = load_word(control, TURN)
        if (word & 0xFFFFF) < (word >> 20 & 0xFFFFF):
            return True
    return False


def arguments(words: str, reals: str = "") -> np.dtype:
    """The arguments of a job by name: int64 words (counts, arrays by address), then float64 reals.

    Raises ValueError for more than the control array has room for.
    """
    record = np.dtype([(name, np.int64) for name in words.split()] + [(name, np.float64) for name in reals.split()])
    if ARGUMENTS + len(record) > CLOCK:
        raise ValueError(f"{len(record)} arguments, but there is room for {CLOCK - ARGUMENTS}")
    return record


@njit
def begin(control, operation, record):
    """Set the function of the next operation; returns its arguments, a `record` of `arguments` to be filled in."""
    control[OPERATION] = operation
    return array_at(control.ctypes.data + 8 * ARGUMENTS, 1, record)[0]


@njit
def given(control, record):
    """Inside a job, from its pointer: the arguments that were filled in after `begin`."""
    return array_at(control_array(control).ctypes.data + 8 * ARGUMENTS, 1, record)[0]


@njit
def array_at(address, shape, dtype):
    """The C-contiguous array of a shape that lies at an address."""
    return carray(pointer_to(address), shape, dtype)


@njit
def run_jobs(control, n_jobs):
    """Do all jobs of the operation in `control`, with whatever helpers come by."""
    began = 0
    if n_jobs > 1 and control[HELPERS]:
        began = _now(control)
        if control[CALLED] < control[HELPERS] and began >= control[RETURN_AT]:
            _call_back(control, began)
    if n_jobs <= 1 or control[CALLED] == 0:
        for job in range(n_jobs):
            call_job(control[OPERATION], control, job)
        return
    open_jobs(control, n_jobs)
    n_own = _work(control)
    wait_for_jobs(control, n_jobs, began, n_own)


@njit
def _work(control):
    """Do jobs until all are taken; returns how many those were."""
    n_done, job = 0, claim_job(control)
    while job >= 0:
        call_job(control[OPERATION], control, job)
        finish_job(control)
        n_done, job = n_done + 1, claim_job(control)
    return n_done


@njit
def _assist(control, helper):
    """What a helper does: jobs, until none were open to it for a while."""
    while await_jobs(control, helper):
        _work(control)


@njit
def hold(arrays):
    """Keep arrays alive up to here: Numba frees one after its last use by name, and an address is no use."""


@njit
def _park(control, change):
    add_word(control, PARKED, change)


class Team:
    """The caller and `n_threads - 1` helpers."""

    def __init__(self, n_threads: int):
        self.control = np.zeros(CONTROL_WORDS, np.int64)
        self._work = threading.Event()
        helpers = range(n_threads - 1)
        self._helpers = [threading.Thread(target=self._help, args=(helper,), daemon=True) for helper in helpers]
        self.control[HELPERS] = self.control[CALLED] = len(self._helpers)
        for helper in self._helpers:
            helper.start()

    @property
    def n_threads(self) -> int:
        return len(self._helpers) + 1

    def wake(self) -> None:
        """Have sleeping helpers look for jobs; cheap enough to be called before every operation."""
        control = self.control
        if control[PARKED] and control[PARKED] > control[HELPERS] - control[CALLED]:  # more than those sent away
            self._work.set()

    def _help(self, helper: int) -> None:
        control = self.control
        while True:
            _assist(control, helper)
            # Cleared before the look at END, which is set before the event, and then set again for the other helpers,
            # of which one may have looked earlier and wait later: so none can sleep through the end.
            self._work.clear()
            if control[END]:
                self._work.set()
                return
            _park(control, 1)
            self._work.wait()
            _park(control, -1)

    def close(self) -> None:
        """End the helpers."""
        self.control[END] = 1
        self._work.set()
        for helper in self._helpers:
            helper.join()


ALONE = Team(1)


def awake(team: Team | None):
    """The control array of a team whose helpers look for jobs; without one the caller works alone."""
    team = team or ALONE
    team.wake()
    return team.control
