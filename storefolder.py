"""The folder of a store: which files are in it, what may go when room is wanted, and how pieces reach the pools.

It owns the folder's rules: names, the lock, the quota, the order in which files go, and damaged ones set aside; it
knows nothing of what is worth keeping. Two engines may share a folder: files never change, whoever removes one holds
the lock, and a file that goes away under a reader is a shorter hit. Invariant: no file goes that is being read, that
the live conversation stands on, or that another one continues, as long as there is one of which nothing of this is
true. Read next: storeflush.py, which adds files; storeindex.py for what is found.
"""

import contextlib
import gc
import heapq
import itertools
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

import blockfile
import unfinished
from storefile import StoreReader, StoreWriter, read_head, system_failures
from storeindex import Hit, Place, StoreFile, StoreIndex
from storelayout import START_MARK, Shape, State, StoreError, starts_like_store

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.store")
DAMAGED = re.compile(NAME.pattern + r"\.damaged")
LOCK_NAME = ".lock"
LOCK_TRIES, LOCK_PAUSE_S = 40, 0.05  # two seconds, in which another engine has removed its files
YOUNG_NS = 2_000_000_000  # a folder changed so shortly before may have changed again within one tick of its clock
MIB = 1 << 20


class Loaded(NamedTuple):
    """What `Store.load` has put into the pools: cells of so many tokens, and the state that was read, if any."""

    n_tokens: int
    state: State | None


def survey(folder: str, index: StoreIndex | None = None) -> tuple[StoreIndex, list[StoreError]]:
    """What is in a folder, and what of it cannot be used; nothing is changed.

    An `index` of an earlier look is brought up to date: no head is read twice.
    """
    index, refusals = index or StoreIndex(), []
    with system_failures(folder, lambda: "reading the folder"):
        names = {name for name in blockfile.system.names(folder) if NAME.fullmatch(name)}
    for name in index.files.keys() - names:
        index.remove(name)
    _read_uses(folder, index.files.values())
    with _without_collections():
        for name in sorted(names - index.files.keys()):
            try:
                index.add(file_of(folder, name))
            except StoreError as error:
                if error.reason != "gone":
                    refusals.append(error)
    return index, refusals


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Heads are many objects and all of them stay: looking for garbage among them takes a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read_uses(folder: str, files: Iterable[StoreFile]) -> None:
    """Find when files were last used; what went meanwhile is found otherwise."""
    for file in files:
        with contextlib.suppress(OSError):
            _, file.used_ns = blockfile.system.size_and_use(os.path.join(folder, file.name))


def file_of(folder: str, name: str) -> StoreFile:
    """A file by its head; raises StoreError."""
    found = read_head(os.path.join(folder, name))
    return StoreFile(name, found.head, found.hash, found.size_bytes, found.used_ns)


class Store:
    """A folder of store files. Not for threads: whoever owns the engine calls it.

    Every method may raise StoreError, `refresh` and what calls it for the folder itself; none of them stops an answer.
    """

    def __init__(self, folder: str, quota_bytes: int, floor_bytes: int, log: Callable[[str], None]):
        """Make the folder where it is missing, sweep what died in it, and read the heads of all files.

        `floor_bytes` of the disk stay free. `log` is given one line for each thing that went wrong.
        """
        self.folder, self.quota_bytes, self.floor_bytes = folder, quota_bytes, floor_bytes
        self.index = StoreIndex()
        self.live: tuple[bytes, np.ndarray] | None = None  # identity and ids of the conversation in the pools
        self.n_damaged = 0
        self.log = log
        self._pinned: Counter[str] = Counter()
        self._passed_over: set[str] = set()  # names that are no files of this version
        self._changed_ns = -1  # the folder's time when its names were read
        if fcntl is None:
            raise StoreError("io", "unsupported", folder, "a store needs file locks, and this system has none")
        with system_failures(folder, lambda: "opening the store"):
            blockfile.system.make_folder(folder)
            unfinished.sweep(folder, _is_ours, len(START_MARK))
        self.refresh()

    def path_of(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def new_name(self, key: bytes) -> str:
        """A name that nobody else takes, for a file that ends at the segment of this key."""
        return f"{key[:8].hex()}-{secrets.token_hex(4)}.store"

    # --- what is there

    def refresh(self) -> None:
        """Bring the index in line with the folder: heads of new files are read, those that went are forgotten."""
        with system_failures(self.folder, lambda: "reading the folder"):
            changed_ns = blockfile.system.folder_changed_ns(self.folder)
            if changed_ns == self._changed_ns:
                return
            is_settled = abs(time.time_ns() - changed_ns) > YOUNG_NS
            names = {name for name in blockfile.system.names(self.folder) if NAME.fullmatch(name)}
        for name in self.index.files.keys() - names:
            self.index.remove(name)
        self._passed_over &= names
        self._changed_ns = changed_ns if is_settled else -1
        with _without_collections():
            for name in sorted(names - self.index.files.keys() - self._passed_over):
                self._take_in(name)

    def _take_in(self, name: str) -> None:
        try:
            self.index.add(file_of(self.folder, name))
        except StoreError as error:
            self.refused(error)

    def take_in(self, name: str, written: StoreWriter) -> None:
        """Know a file that was just written."""
        file = StoreFile(name, written.head, written.hash, written.head.file_bytes, time.time_ns())
        self.index.add(file)

    def refused(self, error: StoreError) -> None:
        """Draw the consequence of a file that could not be used: a damaged one is set aside, with one log line."""
        name = os.path.basename(error.path)
        self.index.remove(name)
        if error.is_damage:
            self.n_damaged += 1
            try:
                blockfile.rename(error.path, f"{name}.damaged")
            except FileNotFoundError:  # another engine was first
                self.log(f"store: {error}")
            except OSError as failure:
                self._passed_over.add(name)
                self.log(f"store: {error}; it cannot be set aside: {failure.strerror}")
            else:
                self.log(f"store: {error}; it is set aside as {name}.damaged")
        elif error.reason != "gone":
            self.log(f"store: {error}; it is left out")
            if error.kind == "invalid" and error.reason != "changed":
                self._passed_over.add(name)
            else:
                self._changed_ns = -1  # what failed now may do next time

    def lookup(self, identity: bytes, ids: np.ndarray) -> Hit:
        """What is held of a prompt, the files of other engines included."""
        self.refresh()
        return self.index.find(identity, ids)

    # --- reading

    @contextlib.contextmanager
    def pinned(self, names: Collection[str]) -> Iterator[None]:
        """Keep files from going meanwhile: those of a hit from the lookup to the end of its load."""
        pins = Counter(list(names))  # a mapping would be taken for counts
        self._pinned += pins
        try:
            yield
        finally:
            self._pinned -= pins

    def load(self, hit: Hit, n_tokens: int, shape: Shape, sinks, state_sink, held: int = 0) -> Loaded:
        """Put the first tokens of a hit into the pools, and the deepest state among them into `state_sink`.

        `sinks` are every layer's window, `shape` theirs; of the first `held` tokens the cells are there already. What
        cannot be read is set aside, and what is before it counts: cells of fewer tokens, and a state at or before
        their end (None where there is none, or where the model folds nothing). Cells behind that may be anything.
        """
        with self.pinned(hit.files):
            n_tokens = self._load_cells(hit, n_tokens, shape, sinks, held)
            states = [place for place in hit.states if place.piece.position <= n_tokens]
            state = self.load_state(states, shape, state_sink) if shape.state_bytes else None
        return Loaded(n_tokens, state)

    def _load_cells(self, hit: Hit, n_tokens: int, shape: Shape, sinks, held: int) -> int:
        n_tokens, done = min(n_tokens, hit.n_tokens), held
        with contextlib.ExitStack() as opened:
            reader = None
            for place, end in _ends(hit.segments):
                segment = place.piece
                if min(end, n_tokens) <= done:
                    continue
                try:
                    if reader is None or reader.path != self.path_of(place.file.name):
                        opened.close()
                        reader = opened.enter_context(self._reader(place.file))
                    reader.segment(place.number, shape, sinks, min(n_tokens, end) - segment.start)
                except StoreError as error:
                    self.refused(error)
                    return min(max(done, held), n_tokens)
                done = min(end, n_tokens)
        return n_tokens

    def load_state(self, states: Sequence[Place], shape: Shape, sink) -> State | None:
        """Fill a sink with the first state that can be read."""
        for place in states:
            try:
                with self._reader(place.file) as reader:
                    reader.state(place.number, shape, sink)
            except StoreError as error:
                self.refused(error)
            else:
                return place.piece
        return None

    def _reader(self, file: StoreFile) -> StoreReader:
        """A reader of a file, which counts as its use."""
        with contextlib.suppress(OSError):  # another user's, or no longer there: the reader tells
            blockfile.system.touch(self.path_of(file.name))
        return StoreReader(self.path_of(file.name), file.hash)

    # --- room

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that removes files; the index is brought in line first. Raises StoreError."""
        path = self.path_of(LOCK_NAME)
        with system_failures(path, lambda: "locking the store"):
            descriptor = self._lock(path)
        try:
            self.refresh()
            yield
        finally:
            with contextlib.suppress(OSError):  # it is closed all the same
                blockfile.system.close(descriptor)

    @staticmethod
    def _lock(path: str) -> int:
        for _ in range(LOCK_TRIES - 1):
            try:
                return blockfile.system.exclude(path)
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S)
        return blockfile.system.exclude(path)

    def protected(self) -> set[str]:
        """Names of files that must not go: pinned ones, and those that the live conversation stands on."""
        return set(self._pinned) | (self.index.find(*self.live).files if self.live else set())

    def make_room(self, size_bytes: int, freed: Collection[str] = ()) -> None:
        """Have a file of this size fit, by removing others. Raises StoreError, kind storage, where it cannot.

        `freed` are files that go as soon as the new one is there: they stay now, and count as gone.
        """
        if size_bytes > self.quota_bytes:
            text = f"{size_bytes} bytes alone are more than the {self.quota_bytes} of --store-mib; it is not kept"
            raise StoreError("storage", "quota", self.folder, text)
        used, free = self._used(freed) + size_bytes, self._free()
        if used > self.quota_bytes or free - size_bytes < self.floor_bytes:
            with self.locked():
                self._evict(size_bytes, freed)

    def _evict(self, size_bytes: int, freed: Collection[str]) -> None:
        stay = self.protected() | set(freed)
        used = self._used(freed) + size_bytes
        victims = self._victims(stay)
        while used > self.quota_bytes or self._free() - size_bytes < self.floor_bytes:
            name = next(victims, None)
            if name is None:
                text = f"there is no room for {size_bytes} bytes, as what else is kept is in use; it is not kept"
                raise StoreError("storage", "room", self.folder, text)
            used -= self.remove(name)

    def _used(self, freed: Collection[str]) -> int:
        """Bytes of all files but some, the damaged ones included."""
        damaged = sum(size for _, size, _ in self._damaged())
        return damaged + sum(file.size_bytes for file in self.index.files.values() if file.name not in freed)

    def _free(self) -> int:
        with system_failures(self.folder, lambda: "asking for the free disk space"):
            return blockfile.system.free_bytes(self.folder)

    def _damaged(self) -> list[tuple[int, int, str]]:
        """Last use, size and name of every file that was set aside, the oldest first."""
        with system_failures(self.folder, lambda: "reading the folder"):
            names = [name for name in blockfile.system.names(self.folder) if DAMAGED.fullmatch(name)]
        found = []
        for name in names:
            with contextlib.suppress(OSError):  # another engine was first
                size_bytes, used_ns = blockfile.system.size_and_use(self.path_of(name))
                found.append((used_ns, size_bytes, name))
        return sorted(found)

    def _victims(self, stay: set[str]) -> Iterator[str]:
        """Names in the order in which they go: what was set aside, then leaves, the least recently used first.

        Files may continue each other in a circle, as flushes carry pieces from one to another: where there is no leaf,
        the least recently used of all goes.
        """
        yield from (name for _, _, name in self._damaged())
        _read_uses(self.folder, self.index.files.values())
        left = {name: (file.used_ns, name) for name, file in self.index.files.items() if name not in stay}
        leaves = [rank for name, rank in left.items() if not self.index.is_continued(self.index.files[name])]
        heapq.heapify(leaves)
        while left:
            _, name = heapq.heappop(leaves) if leaves else min(left.values())
            if left.pop(name, None) is None:
                continue  # it became a leaf more than once
            before = self.index.before(self.index.files[name])
            yield name
            for other in before & left.keys():
                if not self.index.is_continued(self.index.files[other]):
                    heapq.heappush(leaves, left[other])

    def remove(self, name: str) -> int:
        """Remove a file under the lock, and return how many bytes that gave back."""
        path = self.path_of(name)
        with system_failures(path, lambda: "removing it"):
            size_bytes, _ = blockfile.system.size_and_use(path) if DAMAGED.fullmatch(name) else (0, 0)
            with contextlib.suppress(FileNotFoundError):  # somebody removed it by hand
                blockfile.remove(path)
        file = self.index.files.get(name)
        self.index.remove(name)
        return file.size_bytes if file else size_bytes

    def remove_superseded(self, names: Collection[str], is_needed: Callable[[StoreFile], bool]) -> None:
        """Remove files of which nothing is needed any more, as far as that still is so under the lock."""
        with self.locked():
            for name in names:
                file = self.index.files.get(name)
                if file and not self._pinned[name] and not is_needed(file):
                    self.remove(name)

    def prune(self) -> tuple[int, int]:
        """Remove what was set aside and what is over the quota; returns how many files and bytes went."""
        with self.locked():
            used = self._used(())
            n_files, left = 0, used
            for name in self._victims(self.protected()):
                if not DAMAGED.fullmatch(name) and left <= self.quota_bytes:
                    break
                left -= self.remove(name)
                n_files += 1
        return n_files, used - left


def _ends(places: Sequence[Place]) -> Iterator[tuple[Place, int]]:
    """Segments with the token up to which each is read: where the next one has cells of the same, up to those."""
    for place, following in itertools.zip_longest(places, places[1:]):
        same = following is not None and following.piece.start == place.piece.start
        yield place, place.piece.start + following.piece.n_skipped if same else place.piece.end


def _is_ours(start: bytes) -> bool:
    """Whether an unfinished file is that of a store, or none of its bytes reached the disk."""
    return starts_like_store(start) or not start.strip(b"\0")
