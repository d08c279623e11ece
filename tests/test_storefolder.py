"""What goes from a store when room is wanted, damage, what lies there at the start, and two engines on one folder."""

import fcntl
import os
import random
import subprocess
import sys
import time

import pytest

import blockfile
import disksystem
import storefolder
from given_store import (
    BIG,
    IDENTITY,
    PLAIN,
    SHAPE,
    StateSink,
    check_prompt,
    empty_windows,
    files,
    flush,
    ids_of,
    kept,
    new_store,
    position,
    write,
)
from plainhash import hash64
from storeflush import Flush, segments_of
from storefolder import DAMAGED, LOCK_NAME, NAME
from storelayout import (
    CHECKSUM,
    END_MARK,
    HASH_BYTES,
    HEADER,
    Head,
    Segment,
    StoreError,
    block_seed,
    child_key,
    id_bytes,
    pack_head,
    root_key,
)

BLOCK_BYTES = 1 << 14


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockfile, "BLOCK_BYTES", BLOCK_BYTES)


def age(store, name: str, seconds: int) -> None:
    """Make a file as if it had been used so long ago."""
    then = time.time() - seconds
    os.utime(store.path_of(name), (then, then))


# --- room


def chats(store, n: int, n_tokens: int = 500, start=()) -> list:
    """Conversations, the first one the oldest; each with the name of its file."""
    found = []
    for seed in range(n):
        ids = ids_of(n_tokens, 100 + seed, start)
        name = flush(store, kept(ids, [n_tokens])).names[0]
        age(store, name, 1000 * (n - seed))
        found.append((ids, name))
    return found


def test_the_least_recently_used_goes_first_and_never_the_newest(tmp_path):
    store = new_store(tmp_path)
    old = chats(store, 4)
    size = max(files(tmp_path).values())
    store.quota_bytes = 4 * size
    assert position(check_prompt(store, old[0][0])) == (500, 500)  # used just now
    newest = flush(store, kept(ids_of(500, 999), [500]))
    assert set(files(tmp_path)) == {old[0][1], old[2][1], old[3][1], newest.names[0]}
    assert position(check_prompt(store, ids_of(500, 999))) == (500, 500)


def test_a_small_shared_beginning_stays_while_anything_continues_it(tmp_path):
    store, start = new_store(tmp_path), ids_of(300, 1)
    root = flush(store, kept(start, [300], root=300)).names[0]
    age(store, root, 10**6)
    old = chats(store, 4, 900, start)
    assert store.index.is_continued(store.index.files[root])
    store.quota_bytes = sum(files(tmp_path).values()) - 1
    flush(store, kept(ids_of(900, 50, start), [900]))
    assert root in files(tmp_path)
    assert old[0][1] not in files(tmp_path)
    for n_left in (1, 0):
        store.quota_bytes = files(tmp_path)[root] + n_left * max(files(tmp_path).values())
        store.prune()
        assert root in files(tmp_path)
        assert len(files(tmp_path)) == 1 + n_left
    store.quota_bytes = 0
    assert store.prune()[0] == 1
    assert files(tmp_path) == {}


def test_turns_of_one_chat_do_not_evict_each_other(tmp_path):
    """The chain of the live conversation stays; where nothing else is left, the new turn is not kept."""
    store, ids, lines = new_store(tmp_path), ids_of(6000, 1), []
    stranger = flush(store, kept(ids_of(500, 77), [500])).names[0]
    store.quota_bytes = 200_000
    n_kept = 0
    for n_tokens in range(500, 6001, 500):
        store.live = (IDENTITY, ids[:n_tokens])
        try:
            flush(store, kept(ids[:n_tokens], [n_tokens]))
            n_kept = n_tokens
        except StoreError as error:
            lines.append((error.kind, str(error)))
        assert sum(files(tmp_path).values()) <= store.quota_bytes
        assert position(check_prompt(store, ids[:n_kept])) == (n_kept, n_kept)
    assert 1500 < n_kept < 6000
    assert all(kind == "storage" and "it is not kept" in line for kind, line in lines)
    assert stranger not in files(tmp_path)
    store.live = (IDENTITY, ids_of(10, 1234))
    flush(store, kept(ids_of(500, 88), [500]))
    assert position(check_prompt(store, ids_of(500, 88))) == (500, 500)


def test_what_alone_is_over_the_quota_is_refused_and_evicts_nothing(tmp_path):
    store = new_store(tmp_path)
    chats(store, 3)
    before = files(tmp_path)
    store.quota_bytes = sum(before.values())
    with pytest.raises(StoreError, match="alone are more than") as caught:
        flush(store, kept(ids_of(9000, 5), [9000]))
    assert (caught.value.kind, caught.value.reason) == ("storage", "quota")
    assert files(tmp_path) == before


def test_what_is_about_to_be_loaded_is_not_evicted(tmp_path):
    store = new_store(tmp_path)
    old = chats(store, 3)
    store.quota_bytes = sum(files(tmp_path).values())
    hit = store.lookup(IDENTITY, old[0][0])
    with store.pinned(hit.files):
        flush(store, kept(ids_of(500, 5), [500]))
        loaded = store.load(hit, 500, SHAPE, empty_windows(SHAPE, 500), StateSink(SHAPE))
    assert (loaded.n_tokens, loaded.state.position) == (500, 500)
    assert old[0][1] in files(tmp_path)
    assert old[1][1] not in files(tmp_path)
    with store.pinned(store.index.files), pytest.raises(StoreError, match="in use"):
        flush(store, kept(ids_of(500, 6), [500]))
    assert store.protected() == set()


def test_the_floor_of_the_disk_counts_like_the_quota(tmp_path, monkeypatch):
    store = new_store(tmp_path, floor_bytes=1_000_000)
    total = 1_000_000 + 120_000

    def free(self, folder):
        return total - sum(files(tmp_path).values())

    monkeypatch.setattr(disksystem.PosixSystem, "free_bytes", free)
    for seed in range(20):
        flush(store, kept(ids_of(500, seed), [500]))
        assert free(None, "") >= 1_000_000
    assert len(files(tmp_path)) > 1
    total = 1_000_000
    with pytest.raises(StoreError, match="no room"):
        flush(store, kept(ids_of(500, 99), [500]))
    with pytest.raises(StoreError, match="too many tokens for one file"):
        flush(new_store(tmp_path), kept(ids_of(5000, 99), shape=PLAIN))


def test_files_that_continue_each_other_in_a_circle_can_go(tmp_path):
    """Copies move pieces between files: the first holds segments 0 and 2, the second 1 and 3."""
    store, ids = new_store(tmp_path), ids_of(1024, 1)
    for number in (0, 1):
        segments = [segment for segment in segments_of(kept(ids)) if segment.index % 2 == number]
        write(tmp_path / f"{number:016x}-00000000.store", kept(ids), segments)
    store.refresh()
    assert all(store.index.is_continued(file) for file in store.index.files.values())
    assert check_prompt(store, ids)[0] == 1024
    store.quota_bytes = 0
    assert store.prune()[0] == 2


# --- damage


def test_damage_is_a_shorter_hit_and_is_set_aside(tmp_path):
    lines = []
    store, ids = new_store(tmp_path, log=lines.append), ids_of(2600, 1)
    flush(store, kept(ids[:1000], [500, 1000], n_drafted=0, replay=1))
    name = flush(store, kept(ids, [2600])).names[0]
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    n_tokens, state = check_prompt(store, ids)
    assert n_tokens < 2600
    assert n_tokens % 256 == 0
    assert state is None or state.position <= n_tokens
    assert f"{name}.damaged" in files(tmp_path)
    assert name not in files(tmp_path)
    assert len(lines) == 1
    assert name in lines[0]
    assert store.n_damaged == 1
    assert check_prompt(store, ids)[0] <= n_tokens
    flush(store, kept(ids, [2600]))
    assert position(check_prompt(store, ids)) == (2600, 2600)


def test_a_damaged_state_leaves_the_one_before(tmp_path):
    store, ids = new_store(tmp_path), ids_of(1000, 1)
    flush(store, kept(ids[:600], [600], shape=BIG))
    name = flush(store, kept(ids, [1000], shape=BIG)).names[0]
    data = bytearray((tmp_path / name).read_bytes())
    data[-200] ^= 1
    (tmp_path / name).write_bytes(data)
    found = check_prompt(store, ids, shape=BIG)
    assert position(found) in ((1000, 600), (1000, 0))
    assert f"{name}.damaged" in files(tmp_path)


@pytest.mark.parametrize("way", ["flipped head", "cut", "empty", "foreign", "newer", "link", "folder"])
def test_what_lies_in_the_folder_at_the_start(way, tmp_path):
    store, ids, lines = new_store(tmp_path), ids_of(500, 1), []
    name = flush(store, kept(ids, [500])).names[0]
    other = flush(store, kept(ids_of(500, 2), [500])).names[0]
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if way == "flipped head":
        data[300] ^= 1
    elif way == "newer":
        data[8] = 2
    elif way == "foreign":
        data[:8] = b"notes..."
    path.unlink()
    if way == "link":
        path.symlink_to(other)
    elif way == "folder":
        path.mkdir()
    else:
        path.write_bytes(data[: {"cut": -1, "empty": 0}.get(way, len(data))])
    (tmp_path / "notes.txt").write_text("mine")
    again = new_store(tmp_path, log=lines.append)
    assert list(again.index.files) == [other]
    assert len(lines) == 1
    assert name in lines[0]
    is_damage = way not in ("newer", "link", "folder")
    assert (f"{name}.damaged" in files(tmp_path)) == is_damage
    assert (tmp_path / name).exists() != is_damage
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert position(check_prompt(again, ids)) == (0, 0)
    again.lookup(IDENTITY, ids)
    assert len(lines) == 1, "it is said once"


def test_what_was_set_aside_goes_first(tmp_path):
    store = new_store(tmp_path)
    old = chats(store, 3)
    path = tmp_path / old[2][1]
    path.write_bytes(path.read_bytes()[:-1])
    store = new_store(tmp_path)
    store.quota_bytes = sum(files(tmp_path).values()) + 1
    flush(store, kept(ids_of(500, 5), [500]))
    assert not any(map(DAMAGED.fullmatch, files(tmp_path)))
    assert {old[0][1], old[1][1]} <= set(files(tmp_path))


def test_random_damage_never_gives_wrong_bytes(tmp_path):
    """Files are flipped, cut, removed and exchanged while conversations grow and are asked for."""
    rng, store = random.Random(3), new_store(tmp_path, quota_bytes=300_000)
    texts = [ids_of(3000, seed, ids_of(3000, 0)[: rng.choice((0, 256, 700))]) for seed in range(5)]
    lengths = [0] * len(texts)
    n_hits = 0
    for _ in range(250):
        number = rng.randrange(len(texts))
        action = rng.randrange(8)
        present = [path for path in tmp_path.iterdir() if NAME.fullmatch(path.name)]
        if action < 3:
            lengths[number] = min(3000, lengths[number] + rng.randrange(1, 600))
            ids = texts[number][: lengths[number]]
            what = kept(ids, sorted({len(ids), max(1, len(ids) - 50)}), replay=rng.choice((0, 400)))
            for _ in range(10):
                try:
                    flush(store, what)
                except StoreError as error:  # a piece that was to be copied is damaged, and set aside now
                    if error.reason != "room":  # and what else is there of this text leaves it too little
                        continue
                break
            else:
                pytest.fail("a flush that never ends well")
        elif action == 3 and present:
            path = rng.choice(present)
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif action == 4 and present and rng.random() < 0.4:
            path = rng.choice(present)
            way = rng.randrange(3)
            if way == 0:
                os.truncate(path, rng.randrange(path.stat().st_size))
            elif way == 1:
                path.unlink()
            else:
                path.write_bytes(rng.choice(present).read_bytes())
        elif action == 5:
            store = new_store(tmp_path, quota_bytes=300_000)
        else:
            n_tokens, state = check_prompt(store, texts[number])
            n_hits += state is not None and n_tokens > 0
    assert n_hits > 20


# --- two engines


def test_files_of_another_engine_are_seen_and_missed(tmp_path):
    mine, ids = new_store(tmp_path), ids_of(900, 1)
    other = new_store(tmp_path)
    flush(other, kept(ids[:600], [600]))
    assert position(check_prompt(mine, ids)) == (600, 600)
    flush(mine, kept(ids, [900]))
    assert position(check_prompt(other, ids)) == (900, 900)
    hit = other.lookup(IDENTITY, ids)
    for path in tmp_path.glob("*.store"):
        path.unlink()
    loaded = other.load(hit, 900, SHAPE, empty_windows(SHAPE, 900), StateSink(SHAPE))
    assert (loaded.n_tokens, loaded.state) == (0, None)
    assert position(check_prompt(other, ids)) == (0, 0)


def test_a_lookup_reads_no_head_twice(tmp_path, monkeypatch):
    store, read = new_store(tmp_path), []
    chats(store, 3)
    monkeypatch.setattr(storefolder, "read_head", lambda path: read.append(path) or pytest.fail("read again"))
    for _ in range(3):
        store.lookup(IDENTITY, ids_of(10, 1))
    assert read == []


def test_both_flush_the_same_conversation_and_none_of_it_is_lost(tmp_path):
    mine, other, ids = new_store(tmp_path), new_store(tmp_path), ids_of(2000, 1)
    for n_tokens in range(400, 2001, 400):
        for store in (mine, other):
            flush(store, kept(ids[:n_tokens], [n_tokens], replay=10**6))
            assert position(check_prompt(store, ids[:n_tokens])) == (n_tokens, n_tokens)
    assert len(files(tmp_path)) <= 5


def test_a_file_comes_within_one_tick_of_the_folders_clock(tmp_path):
    mine, other, ids = new_store(tmp_path), new_store(tmp_path), ids_of(500, 1)
    mine.lookup(IDENTITY, ids)
    seen_ns = tmp_path.stat().st_mtime_ns
    flush(other, kept(ids, [500]))
    os.utime(tmp_path, ns=(seen_ns, seen_ns))
    assert position(check_prompt(mine, ids)) == (500, 500)


def test_what_another_engine_continues_meanwhile_goes_behind_that(tmp_path):
    mine, other, ids = new_store(tmp_path), new_store(tmp_path), ids_of(900, 1)
    root = flush(mine, kept(ids[:300], [300])).names[0]
    flush(mine, kept(ids_of(300, 7), [300]))
    age(mine, root, 1000)
    flush(other, kept(ids, [900], root=900))
    mine.quota_bytes = sum(files(tmp_path).values()) - 1
    mine.prune()
    assert root in files(tmp_path)


def test_what_is_superfluous_stays_where_it_is_needed_or_read(tmp_path):
    store = new_store(tmp_path)
    (_, name), (_, other) = chats(store, 2)
    store.remove_superseded([name, "gone"], lambda file: True)
    with store.pinned([name]):
        store.remove_superseded([name], lambda file: False)
    assert name in files(tmp_path)
    store.remove_superseded([name], lambda file: False)
    assert set(files(tmp_path)) == {other}


def test_a_copy_that_another_engine_evicts_during_a_flush_is_not_missed(tmp_path):
    """What a flush means to remove is held elsewhere as it begins, and no more when it ends."""
    store, ids = new_store(tmp_path), ids_of(700, 1)
    for number in range(2):
        write(tmp_path / f"{number:016x}-00000000.store", kept(ids, [700]))
    turn = Flush(store, kept(ids_of(800, 2, ids), [800]))
    for name in set(files(tmp_path)) - set(turn._plan.superseded):
        if name.endswith(".store"):
            os.unlink(tmp_path / name)
    while turn.step():
        pass
    assert position(check_prompt(new_store(tmp_path), ids_of(800, 2, ids))) == (800, 800)


def test_who_cannot_get_the_lock_removes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(storefolder, "LOCK_PAUSE_S", 0)
    lines = []
    store, ids = new_store(tmp_path, log=lines.append), ids_of(900, 1)
    chats(store, 2)
    short = ids_of(50, 5)
    replaced = flush(store, kept(short, [50])).names[0]
    before = files(tmp_path)
    with open(tmp_path / LOCK_NAME, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.quota_bytes = sum(before.values())
        with pytest.raises(StoreError, match="locking"):
            flush(store, kept(ids, [900]))
        assert files(tmp_path) == before
        store.quota_bytes *= 10
        flush(store, kept(ids_of(700, 9, short), [700]))  # what it replaces stays for now
        assert before.keys() <= files(tmp_path).keys()
        assert len(lines) == 1
    flush(store, kept(ids_of(700, 9, short), [700]))
    assert replaced not in files(tmp_path)


ENGINE = """
import random, sys
import blockfile
blockfile.BLOCK_BYTES = 1 << 14
from given_store import check_prompt, flush, ids_of, kept, new_store
from storelayout import StoreError

folder, seed = sys.argv[1], int(sys.argv[2])
rng, lines = random.Random(seed), []
store = new_store(folder, quota_bytes=400_000, log=lines.append)
texts = [ids_of(2500, number, ids_of(2500, 9)[:300]) for number in range(4)]
n_hits = n_flushed = 0
for turn in range(120):
    ids = texts[rng.randrange(4)][: rng.randrange(1, 2500)]
    if rng.random() < 0.5:
        try:
            flush(store, kept(ids, [len(ids)], replay=rng.choice((0, 300))))
            n_flushed += 1
        except StoreError as error:
            assert error.reason in ("gone", "changed"), str(error)
    else:
        n_hits += check_prompt(store, ids)[0] > 0
assert not [line for line in lines if "damaged" in line], lines
print(n_hits, n_flushed)
"""


@pytest.mark.processes
def test_two_processes_on_one_folder(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    both = [
        subprocess.Popen([sys.executable, "-c", ENGINE, tmp_path, str(seed)], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE) for seed in (1, 2)
    ]  # fmt: skip
    for process in both:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        n_hits, n_flushed = map(int, out.split())
        assert n_hits > 20
        assert n_flushed > 20
    assert not any(map(DAMAGED.fullmatch, files(tmp_path)))
    store = new_store(tmp_path)
    assert sum(file.size_bytes for file in store.index.files.values()) <= 500_000


def test_unfinished_files_of_the_dead_are_swept_at_the_start(tmp_path):
    (tmp_path / f".{'0' * 16}-{'1' * 8}.store.{'2' * 16}.tmp").write_bytes(b"STRSTOR\x01...")
    (tmp_path / f".other.{'2' * 16}.tmp").write_bytes(b"STRSESS\x01...")
    new_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f".other.{'2' * 16}.tmp"]


# --- many files


@pytest.mark.slow
def test_ten_thousand_files(tmp_path):
    """All heads are read once each, and a start, a lookup and an eviction stay in proportion."""
    ids = ids_of(300, 0)
    write(tmp_path / f"{0:016x}-00000000.store", kept(ids, shape=PLAIN))
    for number in range(1, 10_000):
        (tmp_path / f"{number:016x}-00000000.store").write_bytes(file_of_tail(ids_of(300, number, ids[:256])))
    reads, system = [], disksystem.PosixSystem()
    counted = type("Counted", (disksystem.PosixSystem,), {"read": lambda self, *a: reads.append(1) or system.read(*a)})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blockfile, "system", counted())
        again = new_store(tmp_path)
    assert len(again.index.files) == 10_000
    assert len(reads) == 10_000
    assert again.lookup(IDENTITY, ids_of(300, 77, ids[:256])).n_tokens == 300
    again.quota_bytes = sum(files(tmp_path).values())
    flush(again, kept(ids_of(300, 123_456, ids[:256]), shape=PLAIN))
    assert len(files(tmp_path)) == 10_000
    assert len(again.index.conversations()) == 10_000


def file_of_tail(ids) -> bytes:
    """A file with the last segment of a text alone, its cells zero, made in memory: flushes would take minutes."""
    parent, tail = child_key(root_key(IDENTITY), id_bytes(ids[:256])), id_bytes(ids[256:])
    head = Head(IDENTITY, PLAIN, (Segment(parent, 1, tail, False),), ())
    raw = pack_head(head)
    stream = raw + bytes(head.payload_bytes) + END_MARK
    return stream + CHECKSUM.pack(hash64(stream, block_seed(raw[HEADER.size : HEADER.size + HASH_BYTES], 0)))
