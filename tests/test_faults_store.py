"""Whatever call fails in a flush, a lookup, a load or an eviction, nothing wrong is handed out and nothing is lost.

After each failure the conversations that were kept before are there again, whole, for this engine and for the next one.
"""

import contextlib
import errno
import functools
import itertools
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest

import blockfile
import disksystem
import given_store
import storeflush
import storefolder
import unfinished
from given_faults import (
    CODES,
    KINDS,
    FaultySystem,
    count,
    dies_after,
    dies_before,
    dies_half_way,
    fails,
    first,
    installed,
    no_memory,
    nothing,
    short,
)
from given_store import (
    IDENTITY,
    StateSink,
    empty_windows,
    flush,
    ids_of,
    new_store,
    same_cells,
    same_state,
)
from storecommand import verify_files
from storefolder import DAMAGED, LOCK_NAME, NAME
from storelayout import StoreError
from storeview import StoreView

BLOCK_BYTES = 1 << 13
MOST_CALLS = 600
SURVIVED = 3
SHAPE = given_store.SHAPE._replace(state_sizes=(20_000, 8, 0, 4, 4))  # so large that a flush copies and removes files
kept = functools.partial(given_store.kept, shape=SHAPE)
check_prompt = functools.partial(given_store.check_prompt, shape=SHAPE)
OLD, NEW = ids_of(700, 1), ids_of(1000, 2, ids_of(700, 1))
OTHER = ids_of(300, 5)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(storefolder, "LOCK_PAUSE_S", 0)
    monkeypatch.setattr(storefolder, "LOCK_TRIES", 2)


def every_call(fault, kind: str, only: str = ""):
    """A layer for each n, until an operation made fewer than n calls; the operation runs between two of them."""
    for number in range(1, MOST_CALLS):
        system = FaultySystem(number, fault, only=only, kind=kind)
        yield system
        if not system.met:
            return
    raise AssertionError("an operation without end")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with two conversations, to be copied."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blockfile, "BLOCK_BYTES", BLOCK_BYTES)
        folder = tmp_path_factory.mktemp("filled")
        store = new_store(folder)
        flush(store, kept(OTHER, [300]))
        flush(store, kept(OLD, [600, 700]))
    return folder


def fresh(filled, tmp_path) -> pathlib.Path:
    folder = tmp_path / "store"
    shutil.rmtree(folder, ignore_errors=True)
    return pathlib.Path(shutil.copytree(filled, folder))


def positions(store, ids) -> tuple[int, int]:
    n_tokens, state = check_prompt(store, ids)
    return n_tokens, state.position if state else 0


def under(system, operation) -> StoreError | None:
    """What an operation raised while a call failed; any other exception passes."""
    with installed(system):
        try:
            operation()
        except StoreError as error:
            return error
    return None


def left_over(folder) -> list[str]:
    return [path.name for path in folder.iterdir() if unfinished.NAME.fullmatch(path.name)]


def new_turn(store):
    return lambda: flush(store, kept(NEW, [1000], replay=10**6))


@pytest.mark.faults
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_flush_whose_nth_call_fails(code, filled, tmp_path):
    """Of all calls; and of each that must not fail, as the order of those in threads is not always the same."""
    always = ["create", "write", "flush", "rename", "close", "read", "open_existing"]
    refused = set()
    for only in ("", *always):
        for system in every_call(fails(code), "a call in a flush fails", only):
            if flush_under(system, code, fresh(filled, tmp_path)):
                refused.add(system.met)
    assert set(always) - ({"write", "read"} if code == errno.EINVAL else set()) <= refused  # direct ones are repeated
    assert not refused & {"set_direct", "forget", "touch", "hold", "unlink", "exclude"}


@pytest.mark.faults
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_flush_of_several_files_whose_nth_call_fails(code, filled, tmp_path, monkeypatch):
    """The cells come first: where the file of the state fails, they are there, and the state before them serves."""
    monkeypatch.setattr(storeflush, "LARGE_BYTES", 1)
    found = set()
    for system in every_call(fails(code), "a call in a flush fails"):
        flush_under(system, code, folder := fresh(filled, tmp_path), between=[(1000, 700)])
        found.add(len(list(folder.glob("*.store"))))
    assert found == {3}, "what was there twice is gone: the other one, the cells of this one, and its state"


def flush_under(system, code: int, folder, between=()) -> StoreError | None:
    """Flush a turn while a call fails, hold what is there then against what must be, and flush it again."""
    store = new_store(folder)
    error = under(system, new_turn(store))
    assert error is None or error.kind == KINDS.get(code, "io")
    for again in (store, new_store(folder)):
        found = positions(again, NEW)
        assert found == (1000, 1000) if error is None else found in ((700, 700), (1000, 1000), *between)
        assert positions(again, OTHER) == (300, 300)
    assert left_over(folder) == [] or system.met == "unlink"
    assert not any(DAMAGED.fullmatch(path.name) for path in folder.iterdir())
    flush(store, kept(NEW, [1000], replay=10**6))
    assert positions(store, NEW) == (1000, 1000)
    return error


@pytest.mark.faults
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_load_whose_nth_call_fails(code, filled, tmp_path):
    met = set()
    for system in every_call(fails(code), "a call in a load fails"):
        folder, lines = fresh(filled, tmp_path), []
        store, found = new_store(folder, log=lines.append), []
        store._changed_ns = -1  # what follows asks for everything again

        def load(store=store, found=found):
            found.append(positions(store, OLD))

        error = under(system, load)
        met.add(system.met)
        assert error is None or not found
        assert not any(DAMAGED.fullmatch(path.name) for path in folder.iterdir()), "a failing call is no damage"
        assert positions(store, OLD) == (700, 700), "and does not last"
        assert len(lines) <= 1
    assert {"names", "folder_changed_ns", "open_existing", "status", "read", "touch"} <= met


@pytest.mark.faults
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_start_whose_nth_call_fails(code, filled, tmp_path):
    """A file that cannot be looked at is asked for again at the next lookup."""
    for system in every_call(fails(code), "a call at the start of a store fails"):
        folder, opened = fresh(filled, tmp_path), []
        error = under(system, lambda folder=folder, opened=opened: opened.append(new_store(folder)))
        assert (error is None) == bool(opened)
        store = opened[0] if opened else new_store(folder)
        assert positions(store, OLD) == (700, 700)
        assert positions(store, OTHER) == (300, 300)
        assert not any(DAMAGED.fullmatch(path.name) for path in folder.iterdir())


@pytest.mark.faults
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_removal_whose_nth_call_fails(code, filled, tmp_path):
    """A conversation that shares its first tokens with another one is taken out: that one stays, whatever fails."""
    refused, branch = set(), ids_of(900, 7, OLD[:600])
    folder = fresh(filled, tmp_path)
    flush(new_store(folder), kept(branch, [900]))
    both = shutil.copytree(folder, tmp_path / "both")
    for system in every_call(fails(code), "a call in a removal fails"):
        view = StoreView(str(fresh(both, tmp_path)), [].append)
        name = next(one.id for one in view.conversations() if one.n_tokens == len(OLD))
        error = under(system, lambda view=view, name=name: view.remove(name))
        if error:
            refused.add(system.met)
        store = new_store(view.folder)
        assert positions(store, branch) == (900, 900)
        assert positions(store, OTHER) == (300, 300)
        assert error or positions(store, OLD)[0] == 600
        assert not any(DAMAGED.fullmatch(path.name) for path in pathlib.Path(view.folder).iterdir())
        if error and any(one.id == name for one in view.conversations()):
            view.remove(name)
        assert positions(new_store(view.folder), OLD)[0] == 600
    assert {"create", "rename", "exclude"} <= refused


@pytest.mark.faults
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_an_eviction_whose_nth_call_fails(code, filled, tmp_path):
    refused = set()
    for system in every_call(fails(code), "a call in an eviction fails"):
        folder = fresh(filled, tmp_path)
        store = new_store(folder)
        store.quota_bytes = sum(path.stat().st_size for path in folder.iterdir())
        store.live = IDENTITY, OLD
        error = under(system, lambda store=store: flush(store, kept(ids_of(300, 8), [300])))
        if error:
            refused.add(system.met)
            assert error.kind == KINDS.get(code, "io")
        assert positions(store, OLD) == (700, 700), "the live conversation's files stay"
        assert positions(new_store(folder), ids_of(300, 8)) in ([(300, 300)] if not error else [(0, 0), (300, 300)])
        kept_bytes = sum(path.stat().st_size for path in folder.iterdir() if NAME.fullmatch(path.name))
        assert kept_bytes <= store.quota_bytes
    assert {"unlink", "exclude", "free_bytes"} <= refused


@pytest.mark.faults
def test_memory_that_is_not_there(filled, tmp_path):
    n_refused = 0  # a thread that only frees blocks is done without
    for fault, only in ((no_memory, "allocate"), (fails(errno.ENOMEM), "start_thread")):
        for system in every_call(fault, "an allocation fails", only):
            store = new_store(fresh(filled, tmp_path))
            error = under(system, new_turn(store))
            assert error is None or error.kind == "memory"
            n_refused += error is not None
            assert positions(store, NEW) == ((700, 700) if error else (1000, 1000))
    assert n_refused > 3


@pytest.mark.faults
@pytest.mark.parametrize("fault", [short, nothing], ids=["short", "nothing"])
@pytest.mark.parametrize("call", ["read", "write"])
def test_transfers_of_a_part(call, fault, filled, tmp_path):
    """A short one goes on; one of nothing is an error, or a file that became shorter."""
    for system in every_call(fault, "a transfer of a part", call):
        store = new_store(fresh(filled, tmp_path))
        error = under(system, new_turn(store))
        assert error is None or fault is nothing
        if fault is nothing and call == "read" and error:
            continue  # the file seems cut: it is set aside, as its size at this moment says so
        assert positions(store, NEW) == ((1000, 1000) if error is None else (700, 700))


@pytest.mark.faults
def test_a_full_disk(filled, tmp_path):
    """The n-th write and all behind it find no room; the next flush after room was made does."""
    for number in itertools.count(1):
        folder = fresh(filled, tmp_path)
        store, writes = new_store(folder), itertools.count(1)

        class Full(disksystem.PosixSystem):
            def write(self, descriptor, data, offset, number=number, writes=writes):
                if next(writes) >= number:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(descriptor, data, offset)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(blockfile, "system", Full())
            try:
                new_turn(store)()
                break
            except StoreError as error:
                kind = error.kind
        assert kind == "storage"
        assert left_over(folder) == []
        assert positions(store, NEW) == (700, 700)
        new_turn(store)()
        assert positions(store, NEW) == (1000, 1000)
    assert number > 3


CHANGES = {
    "removed": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "replaced": lambda path: os.replace(shutil.copy(sorted(path.parent.glob("*.store"))[0], path.parent / "x"), path),
    "linked": lambda path: (path.rename(path.parent / "moved"), path.symlink_to("moved")),
}


@pytest.mark.faults
@pytest.mark.parametrize("way", CHANGES)
def test_a_file_that_changes_before_the_nth_call_of_a_load(way, filled, tmp_path):
    for number in itertools.count(1):
        folder = fresh(filled, tmp_path)
        store = new_store(folder)
        hit = store.lookup(IDENTITY, OLD)
        name = hit.segments[-1].file.name
        change = functools.partial(CHANGES[way], folder / name)
        system = FaultySystem(number, first(change), kind="a file changes under a load")
        with installed(system):
            windows, sink = empty_windows(SHAPE, 700), StateSink(SHAPE)
            loaded = store.load(hit, 700, SHAPE, windows, sink)
        check_loaded(loaded, windows, sink)
        if not system.met:
            assert loaded.n_tokens == 700
            break
        assert positions(store, OTHER) in ((300, 300), (0, 0))
        positions(store, OLD)  # what changed behind the last read is seen here
        flush(store, kept(OLD, [700]))
        assert positions(store, OLD) == (700, 700)


def check_loaded(loaded, windows, sink) -> None:
    assert same_cells(SHAPE, windows, OLD[: loaded.n_tokens])
    assert loaded.state is None or same_state(SHAPE, sink, OLD[: loaded.state.position])


@pytest.mark.kills
@pytest.mark.parametrize("death", [dies_before, dies_after, dies_half_way])
def test_kill_9_at_every_call_of_a_flush(death, filled, tmp_path, monkeypatch, capfd):
    """What was kept is there, the new turn is there whole or not at all, and leftovers are swept."""
    if death is dies_half_way:
        monkeypatch.setenv(blockfile.BUFFERED_SWITCH, "1")  # a direct transfer of a part is refused
    seen = set()
    for number in range(1, MOST_CALLS):
        folder = fresh(filled, tmp_path)
        child = os.fork()
        if not child:
            store = new_store(folder)
            system = FaultySystem(number, death, only="write" if death is dies_half_way else "")
            with installed(system):
                new_turn(store)()
            os._exit(SURVIVED if system.met else 0)
        status = os.waitpid(child, 0)[1]
        if not status:
            break
        if os.waitstatus_to_exitcode(status) == SURVIVED:
            continue  # the call itself failed, as one that asks for a faster way may
        assert os.WTERMSIG(status) == signal.SIGKILL
        count("kill -9 at a call in a flush")
        names = {path.name for path in folder.iterdir()} - {LOCK_NAME}
        store = new_store(folder)
        assert left_over(folder) == []
        assert verify_files(str(folder), as_json=True, reporting=lambda path: contextlib.nullcontext())
        found = positions(store, NEW)
        assert found in ((700, 700), (1000, 1000))
        assert positions(store, OTHER) == (300, 300)
        seen.add((found, len(names)))
        new_turn(store)()
        assert positions(store, NEW) == (1000, 1000)
    assert {found for found, _ in seen} == ({(700, 700), (1000, 1000)} if death is not dies_half_way else {(700, 700)})
    assert number > 3


def test_the_model_of_these_tests_tells_wrong_bytes():
    """The check that all of this rests on fails where one byte of one cell is another one."""
    windows = kept(OLD).windows
    assert np.array_equal(windows[0].parts[0], kept(OLD).windows[0].parts[0])
    windows[0].parts[0][5] ^= 1
    assert not same_cells(SHAPE, windows, OLD)
