"""Imports run one way; the graph is read from the sources."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jit

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}

# What each module may import of the others. A new line here is a decision about the structure, not a formality.
ALLOWED = {
    "cells": set(),
    "options": {"cells"},
    "kernelcache": set(),
    "jit": {"kernelcache"},
    "cpusimd": {"jit"},
    "cpuunits": {"cpusimd"},
    "cpumemory": {"cpusimd", "jit"},
    "cputeam": {"jit"},
    "packs": set(),
    "cpudecode": {"jit", "packs", "cpusimd"},
    "cpusums": {"jit", "packs", "cpusimd"},
    "cpuproducts": {"cpudecode", "cpumemory", "cpusimd", "cpusums", "cputeam", "cpuunits", "jit", "packs"},
    "cpuattention": {"cells", "cpumemory", "cpusimd", "cpusums", "cputeam", "jit", "packs"},
    "kernels_cpu": {"cells", "cpuattention", "cpumemory", "cpuproducts", "cpusimd", "cpusums", "cputeam", "jit"}
    | {"packs"},
    "checksum": {"cpusimd", "cpuunits", "jit"},
    "fingerprint": {"checksum"},
    "modelfile": set(),
    "resources": set(),
    "unfinished": set(),
    "helperthread": set(),
    "disksystem": {"helperthread", "resources", "unfinished"},
    "blockfile": {"disksystem", "helperthread", "unfinished"},
    "sessionlayout": {"blockfile", "cells"},
    "plainhash": set(),
    "sessionparse": {"cells", "plainhash", "sessionlayout"},
    "sessioninfo": {"printable", "sessionlayout"},
    "sessionfile": {"sessioninfo", "sessionlayout", "sessionparse", "blockfile", "checksum", "plainhash"},
    "storelayout": {"blockfile", "cells"},
    "storefile": {"blockfile", "checksum", "storelayout"},
    "storeindex": {"storelayout"},
    "storefolder": {"blockfile", "storefile", "storeindex", "storelayout", "unfinished"},
    "storeflush": {"storefile", "storefolder", "storeindex", "storelayout"},
    "storekeeper": {"fingerprint", "kvcache", "promptcache", "sessionstate", "storeflush", "storefolder", "storeindex"}
    | {"storelayout", "verbs"},
    "storeexchange": {"blockfile", "engine", "generation", "kvcache", "options", "sessionstate", "storeflush"}
    | {"storeindex", "storekeeper", "storelayout", "storeview", "verbs"},
    "storeview": {"printable", "storefile", "storeflush", "storefolder", "storeindex", "storelayout"},
    "storecommand": {"blockfile", "printable", "storefile", "storefolder", "storeindex", "storelayout"},
    "chattemplate": set(),
    "tokenizer": {"chattemplate", "modelfile"},
    "httpknown": set(),
    "verbs": {"options"},
    "sampling": {"verbs"},
    "cudablock": set(),
    "cudapools": {"cells"},
    "cudaproducts": {"cpuproducts", "cudablock", "cudapools", "packs"},
    "cudaattention": {"cells", "cudablock", "cudapools"},
    "cpuexperts": {"cpudecode", "cpuproducts", "jit", "packs", "cpusimd", "cputeam"},
    "cudaexperts": {"cpuexperts", "cpuproducts", "cudaproducts", "cudapools", "packs", "cputeam"},
    "expertprofile": set(),
    "kernels_cuda": {"cudaattention", "cudablock", "cudaproducts", "cudapools", "cudaexperts", "kernels_cpu"},
    "backend": {"kernels_cpu", "kernels_cuda"},
    "kvcache": {"cells"},
    "promptcache": {"kvcache"},
    "modelconfig": {"cells", "kvcache"},
    "modelweights": {"modelconfig", "modelfile", "packs"},
    "model": {"kvcache", "modelconfig", "modelweights"},
    "controlvector": {"checksum", "modelfile"},
    "sessionstate": {"cpumemory", "kvcache", "promptcache", "sessionlayout"},
    "generation": {"kvcache", "model", "promptcache", "sampling", "verbs"},
    "conversations": {"generation", "kvcache", "modelconfig", "promptcache", "resources", "verbs", "storekeeper"},
    "engine": {"storefolder", "storekeeper", "storelayout"}
    | {"sessionlayout", "conversations", "modelfile", "generation", "model", "modelconfig", "modelweights"}
    | {"promptcache", "sessionstate", "sessionfile", "fingerprint", "expertprofile", "jit", "options", "resources"}
    | {"backend", "cells", "controlvector", "kvcache", "sessionfolder", "verbs"},
    "serveloop": {"sessionlayout", "engine", "generation", "options", "sessionfile", "sessionfolder", "verbs"},
    "httptools": set(),
    "httpanswer": {"httptools"},
    "httpfields": {"printable"},
    "httpsampling": {"httpfields", "verbs"},
    "httpmessages": {"httpanswer", "httpfields", "httptools"},
    "printable": set(),
    "httplines": {"verbs"},
    "httppipes": {"httplines", "printable"},
    "httpchild": {"httplines", "httppipes", "printable", "verbs"},
    "httppage": set(),
    "httpchat": {"httpanswer", "httpfields", "httpmessages", "httpsampling", "tokenizer", "httptools", "verbs"},
    "httpguard": {"httpfields", "options"},
    "httplimits": {"httpfields", "httpguard"},
    "httpmodel": {"tokenizer"},
    "httpstatus": {"httpchild"},
    "httpconversation": {"httpanswer", "httpmessages", "tokenizer"},
    "httpsignals": set(),
    "sessionfolder": {"options", "printable", "sessionfile", "sessioninfo", "sessionlayout", "unfinished"},
    "httpoptions": {"httpguard", "options", "printable", "sessionfolder"},
    "httpserver": {"httplines", "httplimits", "printable", "tokenizer"},
    "httptextworker": {"httpfields", "httpchat", "httpknown", "tokenizer"},
    "httptexts": {"httpfields", "httpknown", "httptextworker", "tokenizer"},
    "httperrors": {"httpfields", "httpguard", "httplines"},
    "httpstream": {"httpchat", "httpchild", "httperrors", "httpfields", "httplines", "tokenizer", "verbs"},
    "httproutes": {"httpchat", "httpconversation", "httperrors", "httpfields", "httpguard", "httpknown", "httplines"}
    | {"httppage", "httpstatus", "httpstream", "httptexts", "httptextworker", "sessionfolder", "storelayout"}
    | {"storeview", "tokenizer"},
    "httpfront": {"httpchat", "httpchild", "httplines", "httpmodel", "httpoptions", "httproutes", "httpserver"}
    | {"httpsignals", "httptexts", "printable", "sessionfolder", "storeview", "tokenizer", "verbs"},
    "declaration": set(),
    "demostage": {"tokenizer", "verbs"},
    "demofiles": {"declaration", "demostage", "tokenizer"},
    "demo": {"declaration", "demostage", "storelayout", "storeview", "tokenizer"},
    "warmup": {"sessionlayout", "engine", "jit", "options", "sessionfile", "verbs"},
    "strata": {"demo", "demofiles", "demostage", "engine", "httpconversation", "httpfront", "modelfile", "options"}
    | {"printable", "serveloop", "sessionfile", "sessionfolder", "sessioninfo", "sessionlayout", "storecommand"}
    | {"storeexchange", "tokenizer", "warmup"},
}


def imports(tree: ast.AST) -> set[str]:
    """The top-level names that a tree imports, wherever it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the modules are flat"
            names.add(node.module.split(".")[0])
    return names


def top_level(tree: ast.Module) -> set[str]:
    """What is imported when the module is."""
    return set().union(*(imports(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)))


def test_every_module_has_its_place_in_the_graph():
    assert MODULES.keys() == ALLOWED.keys()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_what_lies_below_it(name):
    assert imports(MODULES[name]) & MODULES.keys() <= ALLOWED[name]


def test_the_graph_has_no_cycle():
    below = {name: set(direct) for name, direct in ALLOWED.items()}
    while ready := {name for name, direct in below.items() if not direct}:
        below = {name: direct - ready for name, direct in below.items() if name not in ready}
    assert not below


def test_the_command_line_needs_the_options_and_the_standard_library_alone():
    assert top_level(MODULES["strata"]) <= sys.stdlib_module_names | {"options"}
    assert imports(MODULES["options"]) <= sys.stdlib_module_names | {"cells"}
    assert imports(MODULES["cells"]) <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "name",
    ["strata", "tokenizer", "modelfile", "demo", "declaration", "sessionfile", "storecommand", "httpfront", "verbs"],
)
def test_what_needs_no_kernel_does_not_load_numba(name):
    reached, waiting = set(), {name}
    while waiting:
        reached |= waiting
        waiting = set().union(*(top_level(MODULES[module]) for module in waiting & MODULES.keys())) - reached
    assert "numba" not in reached


@pytest.mark.parametrize("name", sorted(name for name, tree in MODULES.items() if "numba" in top_level(tree)))
def test_kernels_are_kept_in_our_folder_whichever_module_comes_first(name, tmp_path):
    """Also behind a program that had numba read other settings."""
    code = f"import numba, {name}, jit, cputeam; print(cputeam.claim_job._cache.cache_path)"
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith(str(tmp_path / "strata" / "numba-"))


def test_kernels_are_compiled_anew_when_any_source_of_theirs_changes():
    named = {path.stem for pattern in jit.KERNEL_SOURCES for path in ROOT.glob(pattern)}
    with_kernels = {name for name, tree in MODULES.items() if "jit" in top_level(tree)} - {"engine", "warmup"}
    below = set().union(*(top_level(MODULES[name]) & MODULES.keys() for name in with_kernels)) - {"kernelcache"}
    assert with_kernels | below <= named


def test_no_test_imports_another():
    """What two of them need lies in a module that is no test; programs in strings count too."""
    wanted = re.compile(r"^ *(?:from|import) +(test_\w+)", re.MULTILINE)
    tests = {path.name: wanted.findall(path.read_text()) for path in (ROOT / "tests").glob("*.py")}
    assert {name: found for name, found in tests.items() if found} == {}
