"""A team whose helper loses its core: it is sent away for a while, and every job is done once, by whoever is left."""

import threading

import numpy as np
import pytest
from numba import types

import cputeam as teams
from cputeam import ARGUMENTS, CALLED, DONE, PARKED, RETURN_AT, STEP, Job, Team, awake, control_array, run_jobs
from jit import njit

N_JOBS = 8
OWNER, MARKS, SLOW_NS = ARGUMENTS, ARGUMENTS + 1, ARGUMENTS + 1 + N_JOBS

_self = types.ExternalFunction("pthread_self", types.int64())


@njit
def _thread():
    return _self()


def _job(control, job):
    """Notes who did it; whoever is not the caller waits for its turn, and then takes as long as it is told."""
    c = control_array(control)
    mine = _self() == c[OWNER]
    teams.add_word(c, MARKS + job, 1 if mine else 1000)
    if mine and c[SLOW_NS]:
        while teams.load_word(c, DONE) + 1 < N_JOBS and not _anyone_else(c):
            pass  # not before the helper holds a job
    if not mine:
        began = _now(c)
        while _now(c) - began < c[SLOW_NS]:
            pass


@njit
def _anyone_else(c):
    for job in range(N_JOBS):  # noqa: SIM110
        if c[MARKS + job] >= 1000:
            return True
    return False


@njit
def _now(c):
    """A clock with room of its own for its two words."""
    room = np.empty(2, np.int64)
    teams._clock_gettime(teams._MONOTONIC, room.ctypes.data)
    return room[0] * 1_000_000_000 + room[1]


_JOB = Job(_job)


def run(team: Team, slow_ns: int = 0) -> tuple[int, int]:
    """All jobs once; how many the caller did, and how many the helper."""
    control, over = awake(team), threading.Event()
    waking = threading.Thread(target=lambda: [team.wake() for _ in iter(over.is_set, True)])
    control[teams.OPERATION] = _JOB.address
    control[ARGUMENTS : SLOW_NS + 1] = (_thread(), *[0] * N_JOBS, slow_ns)
    waking.start()  # a helper may fall asleep just as the caller begins to wait for it
    run_jobs(control, N_JOBS)
    over.set()
    waking.join()
    marks = control[MARKS : MARKS + N_JOBS].tolist()
    assert set(marks) <= {1, 1000}, "each job is done once"
    return marks.count(1), marks.count(1000)


@pytest.fixture
def team():
    team = Team(2)
    yield team
    team.close()


LOST_NS = 700 * teams.LOST_NS  # far more than the caller may be kept from its own core


def test_a_helper_that_is_waited_for_is_sent_away_and_called_back(team):
    assert sum(run(team)) == N_JOBS
    assert team.control[CALLED] == 1
    own, others = run(team, LOST_NS)
    assert (own + others, others >= 1) == (N_JOBS, True)
    assert (team.control[CALLED], team.control[STEP]) == (1, 0), "once may be chance"
    run(team, LOST_NS)
    assert (team.control[CALLED], team.control[STEP]) == (0, 1)
    assert team.control[RETURN_AT] > 0
    team.control[RETURN_AT] = 2**62  # not yet
    for _ in range(20):
        assert run(team) == (N_JOBS, 0)
    team.control[RETURN_AT] = 0
    run(team)
    assert team.control[CALLED] == 1
    assert run(team, LOST_NS)[1] >= 1, "it takes jobs again"


def test_one_that_is_lost_again_at_once_stays_away_twice_as_long(team):
    steps = []
    run(team, LOST_NS)
    for _ in range(teams.MOST_STEPS + 2):
        run(team, LOST_NS)
        assert team.control[CALLED] == 0
        steps.append(team.control[STEP])
        assert team.control[teams.AWAY] >= min(teams.MOST_AWAY_NS, teams.LOST_NS << steps[-1])
        team.control[RETURN_AT] = 0
    assert steps == [*range(1, teams.MOST_STEPS), *[teams.MOST_STEPS] * 3]
    team.control[teams.RETURNED] = -(2**61)  # long ago
    team.control[CALLED] = 1
    team.control[RETURN_AT] = 2**62
    run(team, LOST_NS)
    assert team.control[STEP] == 0


def test_only_one_of_several_helpers_is_sent_away_at_a_time():
    team = Team(4)
    run(team, LOST_NS)
    run(team, LOST_NS)
    assert team.control[CALLED] == 2
    team.control[RETURN_AT] = 2**62
    assert sum(run(team)) == N_JOBS
    team.close()
    assert team.control[PARKED] <= 3


@pytest.mark.slow
def test_a_team_ends_wherever_its_helpers_are():
    def many():
        for _ in range(2000):
            Team(5).close()

    trial = threading.Thread(target=many, daemon=True)
    trial.start()
    trial.join(120)
    assert not trial.is_alive(), "a helper slept through the end"
