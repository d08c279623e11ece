"""Imports run one way; the graph is read from the sources."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}

# What each module may import of the others. A new line here is a decision about the structure, not a formality.
ALLOWED = {
    "options": set(),
    "kernelcache": set(),
    "jit": {"kernelcache"},
    "simd": {"jit"},
    "team": {"jit"},
    "packs": set(),
    "cpudecode": {"jit", "packs", "simd"},
    "cpuproducts": {"cpudecode", "jit", "packs", "simd", "team"},
    "cpuattention": {"cpuproducts", "jit", "packs", "simd", "team"},
    "kernels_cpu": {"bytecopy", "cpuattention", "cpuproducts", "jit", "packs", "simd", "team"},
    "fingerprint": {"jit", "simd"},
    "gguffile": set(),
    "resources": set(),
    "unfinished": set(),
    "helperthread": set(),
    "blockfile": {"helperthread", "resources", "unfinished"},
    "bytecopy": {"jit", "simd"},
    "sessionlayout": {"blockfile", "options"},
    "plainhash": set(),
    "sessionparse": {"plainhash", "sessionlayout"},
    "sessionfile": {"sessionlayout", "sessionparse", "blockfile", "fingerprint", "plainhash"},
    "storelayout": {"blockfile"},
    "storefile": {"blockfile", "fingerprint", "storelayout"},
    "storeindex": {"storelayout"},
    "storefolder": {"blockfile", "storefile", "storeindex", "storelayout", "unfinished"},
    "storeflush": {"storefile", "storefolder", "storeindex", "storelayout"},
    "storecommand": {"blockfile", "printable", "storefile", "storefolder", "storeindex", "storelayout"},
    "chattemplate": set(),
    "tokenizer": {"chattemplate", "gguffile"},
    "knowntext": set(),
    "verbs": set(),
    "sampling": {"verbs"},
    "cudablock": set(),
    "cudapools": {"kernels_cpu"},
    "cudaproducts": {"cpuproducts", "cudablock", "cudapools", "packs"},
    "cudaattention": {"cudablock", "cudapools", "kernels_cpu"},
    "cpuexperts": {"cpudecode", "cpuproducts", "jit", "packs", "simd", "team"},
    "cudaexperts": {"cpuexperts", "cpuproducts", "cudaproducts", "cudapools", "packs", "team"},
    "expertprofile": set(),
    "kernels_cuda": {"cudaattention", "cudablock", "cudaproducts", "cudapools", "cudaexperts", "kernels_cpu"},
    "backend": {"kernels_cpu", "kernels_cuda"},
    "kvcache": {"kernels_cpu", "options"},
    "promptcache": {"kvcache"},
    "weights": {"gguffile", "kvcache", "packs"},
    "model": {"weights", "kvcache"},
    "controlvector": {"fingerprint", "gguffile"},
    "sessionstate": {"bytecopy", "kvcache", "promptcache", "sessionlayout"},
    "generation": {"kvcache", "promptcache", "sampling", "verbs"},
    "conversations": {"generation", "kvcache", "promptcache", "resources", "verbs", "weights"},
    "engine": {"conversations", "gguffile", "generation", "model", "weights", "controlvector", "backend", "kvcache"}
    | {"promptcache", "sessionstate", "sessionfile", "fingerprint", "expertprofile", "jit", "options", "resources"}
    | {"sessionfolder", "verbs"},
    "serveloop": {"engine", "generation", "options", "sessionfile", "sessionfolder", "verbs"},
    "toolcalls": set(),
    "answertext": {"toolcalls"},
    "bodyfields": {"printable"},
    "samplingfields": {"bodyfields", "verbs"},
    "chatmessages": {"answertext", "bodyfields", "toolcalls"},
    "printable": set(),
    "childlines": {"verbs"},
    "childpipes": {"childlines", "printable"},
    "childproc": {"childlines", "childpipes", "printable", "verbs"},
    "webpage": set(),
    "chatapi": {"answertext", "bodyfields", "chatmessages", "samplingfields", "tokenizer", "toolcalls", "verbs"},
    "httpguard": {"bodyfields", "options"},
    "httplimits": {"bodyfields", "httpguard"},
    "httpmodel": {"tokenizer"},
    "httpstatus": {"childproc"},
    "httpconversation": {"answertext", "tokenizer"},
    "httpsignals": set(),
    "sessionfolder": {"printable", "sessionfile", "unfinished"},
    "httpoptions": {"httpguard", "options", "printable", "sessionfolder"},
    "httpserver": {"childlines", "httplimits", "printable", "tokenizer"},
    "textworker": {"bodyfields", "chatapi", "knowntext", "tokenizer"},
    "textpool": {"bodyfields", "knowntext", "textworker", "tokenizer"},
    "httpfront": {
        "bodyfields",
        "chatapi",
        "childlines",
        "childproc",
        "httpguard",
        "httpmodel",
        "httpoptions",
        "httpserver",
        "httpsignals",
        "httpstatus",
    }
    | {"httpconversation", "knowntext", "printable", "sessionfolder", "textpool", "textworker", "tokenizer", "verbs"}
    | {"webpage"},
    "declaration": set(),
    "demo": {"tokenizer", "declaration", "verbs"},
    "warmup": {"engine", "jit", "options", "sessionfile", "verbs"},
    "strata": {"serveloop", "httpfront", "engine", "sessionfile", "tokenizer", "gguffile", "demo", "warmup"}
    | {"options", "printable", "storecommand"},
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
    assert imports(MODULES["options"]) <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "name",
    ["strata", "tokenizer", "gguffile", "demo", "declaration", "sessionfile", "storecommand", "httpfront", "verbs"],
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
    code = f"import numba, {name}, jit, team; print(team.claim_job._cache.cache_path)"
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


def test_no_test_imports_another():
    """What two of them need lies in a module that is no test; programs in strings count too."""
    wanted = re.compile(r"^ *(?:from|import) +(test_\w+)", re.MULTILINE)
    tests = {path.name: wanted.findall(path.read_text()) for path in (ROOT / "tests").glob("*.py")}
    assert {name: found for name, found in tests.items() if found} == {}
