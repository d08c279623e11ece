"""Compiled kernels on disk: the folder that keeps them, and files that are proved sound before they are used.

It owns the folder's name, each file's seal and what is done about a file that is not sound; it knows no kernel.
Invariant: nothing of a file is unpickled before its digest was found right; whatever lies in a file's place, the kernel
is compiled anew and the file replaced, and where no folder can be written nothing is left behind. Read next: jit.py.
"""

import contextlib
import hashlib
import os
import pathlib
import pickle
import shutil
import sys
import tempfile
import time

import llvmlite
import numba
from numba.core import caching
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

TITLE = b"strata kernel 1\n"
DIGEST_BYTES = 32
MOST_BYTES = 64 << 20  # of one file; the largest kernels take a quarter of a megabyte
NO_FOLDER = "no folder for compiled kernels can be written: set XDG_CACHE_HOME to one that can"
STALE_S = 3600  # a file takes its name a moment after it was begun; one this old belongs to a process that was killed


class KernelFolder:
    """Where compiled kernels are kept between processes; `failure` says why they are not.

    The folder is named by a digest of all kernel sources (Numba itself looks only at the file of the outermost
    function) and of the compilers' versions, so that a kernel made of anything else is never loaded.
    """

    def __init__(self, sources: list[pathlib.Path]):
        digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
        for source in sources:
            digest.update(source.read_bytes())
        self.digest = digest.hexdigest()
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(home, "strata")
        self.path = os.path.join(root, f"numba-{self.digest[:16]}")
        self.failure = ""
        self._swept = False
        try:
            os.makedirs(self.path, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError:
            self.failure = NO_FOLDER

    def outlook(self) -> str:
        """What the next start will find of what this process compiled."""
        if self.failure:
            return f"the next start compiles them again: {self.failure}"
        return "the next start finds them in the cache"

    def cache_of(self, function) -> caching._Cache:
        """What Numba asks for compiled forms of a function, and hands new ones to."""
        return caching.NullCache() if self.failure else _KernelCache(function, self)

    def read(self, path: str):
        """What a file holds; None where there is none, or none that is sound, and then it was told and is gone."""
        try:
            with open(path, "rb", opener=_open) as file:
                raw = file.read(MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._discard(path, f"it cannot be read ({error.strerror})")
        seal, data = raw[: len(TITLE) + DIGEST_BYTES], raw[len(TITLE) + DIGEST_BYTES :]
        if seal != TITLE + hashlib.sha256(data).digest():
            return self._discard(path, "it is damaged")
        return pickle.loads(data)

    def _discard(self, path: str, reason: str) -> None:
        """Make room for a new file; a cache holds nothing that would be missed."""
        told = f"the compiled kernel {path} is not used, it is compiled anew: {reason}"
        try:
            _remove(path)
        except FileNotFoundError:
            pass  # another process was first
        except OSError as error:
            told += f"; it cannot be removed ({error.strerror})"
        _log(told)

    def write(self, path: str, value) -> None:
        """Have a file hold a value; it takes its name when it is whole. From the first failure on nothing is kept."""
        if self.failure:
            return
        data = dumps(value)
        seal = TITLE + hashlib.sha256(data).digest()
        try:
            self._sweep()
            descriptor, temporary = tempfile.mkstemp(prefix=f"{os.path.basename(path)}.", suffix=".tmp", dir=self.path)
            try:
                with open(descriptor, "wb") as file:
                    file.write(seal + data)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            self.failure = f"{self.path} cannot be written ({error.strerror})"
            _log(f"compiled kernels are not kept: {self.failure}")

    def _sweep(self) -> None:
        """Remove what killed processes left, once in a process that writes."""
        if not self._swept:
            self._swept = True
            for path in pathlib.Path(self.path).glob("*.tmp"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > STALE_S:
                        _remove(path)


def _remove(path: str | pathlib.Path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer must not hold up the start


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Files:
    """The index of one function's compiled forms, and a file for each; in the place of Numba's IndexDataCacheFile.

    A form's file is named by its key: so two processes that write at once can lose an entry of the index, which costs
    a compilation, but never take the one form for the other.
    """

    def __init__(self, folder: KernelFolder, base: str):
        self._folder, self._base = folder, os.path.join(folder.path, base)

    def flush(self) -> None:
        self._folder.write(f"{self._base}.nbi", {})

    def _index(self) -> dict:
        return self._folder.read(f"{self._base}.nbi") or {}

    def load(self, key):
        name = self._index().get(key)
        return self._folder.read(os.path.join(self._folder.path, name)) if name else None

    def save(self, key, data) -> None:
        index = self._index()
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        name = index.get(key) or f"{os.path.basename(self._base)}.{digest[:16]}.nbc"
        self._folder.write(os.path.join(self._folder.path, name), data)
        self._folder.write(f"{self._base}.nbi", index | {key: name})


class _KernelCache(caching.FunctionCache):
    """Numba's cache of one function, over files of ours; `_index_key` and the rest are Numba's own."""

    def __init__(self, function, folder: KernelFolder):
        self._py_func, self._name, self._cache_path = function, repr(function), folder.path
        code, name = function.__code__, function.__qualname__.replace("<", "").replace(">", "")
        module = pathlib.Path(code.co_filename).stem
        base = f"{module}.{name}-{code.co_firstlineno}.{sys.implementation.cache_tag}"
        self._cache_file = _Files(folder, base)
        self.enable()

    def load_overload(self, sig, target_context):
        target_context.refresh()
        kept = self._cache_file.load(self._index_key(sig, target_context.codegen()))
        return None if kept is None else CompileResult._rebuild(target_context, *kept)

    def save_overload(self, sig, data) -> None:
        assert not data.library.has_dynamic_globals, f"{self._name} holds an address of this process"
        self._cache_file.save(self._index_key(sig, data.codegen), data._reduce())
