"""Both backends keep the contract: every operation, with the same arguments; test_kernels_cuda.py tests the choice."""

import dataclasses
import inspect
import threading

import pytest

import backend
import kernels_cpu

pytest.importorskip("numba.cuda")
import kernels_cuda

PLAIN = ("name", "n_threads", "own_memory", "max_head", "max_state", "errors", "close")
OPERATIONS = [field.name for field in dataclasses.fields(backend.Backend) if field.name not in PLAIN]


@pytest.fixture(scope="module")
def both():
    host = backend.Backend("cpu", 1, **kernels_cpu.operations(1))
    yield host, backend.Backend("cuda", 1, **kernels_cuda.operations())
    host.close()


def arguments(function) -> list[str]:
    """Names of what a caller gives; a team is bound, and a kernel has them on the function it was compiled from."""
    function = getattr(function, "py_func", function)
    return [name for name in inspect.signature(function).parameters if name != "team"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_same_arguments_in_both(name, both):
    on_host, on_device = (getattr(one, name) for one in both)
    if name != "place_experts":  # only of a backend with a memory of its own
        assert arguments(on_host) == arguments(on_device)
    assert inspect.getdoc(on_device) or name == "ngram_rows"


def test_a_backend_without_an_operation_or_with_one_too_many_cannot_be_made():
    parts = kernels_cpu.operations(1)
    parts["close"]()
    for broken in (parts | {"matvec": print}, {name: part for name, part in parts.items() if name != "route"}):
        with pytest.raises(TypeError, match=r"matvec|route"):
            backend.Backend("cpu", 1, **broken)


def test_threads_end_with_their_backend():
    before = threading.active_count()
    loaded = backend.load("cpu", 3, print)
    assert threading.active_count() == before + 2
    del loaded
    assert threading.active_count() == before
