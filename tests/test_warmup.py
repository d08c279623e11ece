"""`strata warmup`: the kernel cache is full behind it, and it says so only where that is true."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import jit
import modelfile
import strata
import warmup

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "tests" / "data" / "model" / "qwen4exp.gguf")


def quiet(_) -> None:
    """Takes what is told and drops it."""


@pytest.fixture
def run(capsys):
    """Runs `strata warmup`; returns exit code, stdout and stderr."""

    def run_command(*args: str) -> tuple[int, str, str]:
        return strata.main(["warmup", *args]), *capsys.readouterr()

    return run_command


def test_the_embedded_model_has_nothing_left_to_compile_the_second_time(run):
    assert run()[0] == 0
    code, out, err = run()
    assert (code, out.count("\n")) == (0, 1)
    assert re.match(r"no kernel had to be compiled, \d+\.\d s; they are kept in ", out)
    assert out.endswith(f"{jit.KERNELS.path}\n")
    assert "compiling" not in err


@pytest.mark.processes
def test_an_engine_behind_it_compiles_nothing(tmp_path):
    """Not even for the first turn, save and restore: another process that must compile fails."""
    warmup.fill_cache(MODEL, quiet, quiet)
    code = """if True:
        import sys
        import numpy as np
        from numba.core import event
        from engine import Engine, GenRequest, Session
        from options import EngineOptions

        class Refuse(event.Listener):
            def on_start(self, event): print("compiled:", event.data["dispatcher"], flush=True)
            def on_end(self, event): pass

        with event.install_listener("numba:compile", Refuse()):
            engine = Engine.load(EngineOptions(sys.argv[1], session_min_free_mib=0, conversation_cache_min_free_mib=0))
            session = Session(engine)
            list(session.generate(GenRequest(np.arange(6, 90, dtype=np.int32), 8)))
            session.save(sys.argv[2])
            print(session.restore(sys.argv[2]).n_tokens)
    """
    command = [sys.executable, "-c", code, MODEL, str(tmp_path / "a.bin")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "91\n"


def test_what_was_compiled_is_counted(monkeypatch, run):
    """A kernel that is compiled while the model loads, in a process whose cache has none of it."""
    load = warmup.Engine.load

    def compiling_load(options, log):
        jit.numba.njit(lambda x: x + 1)(1)
        return load(options, log)

    monkeypatch.setattr(warmup.Engine, "load", compiling_load)
    warmup.fill_cache(MODEL, quiet, quiet)  # what is not in the cache yet is compiled here
    told = []
    assert warmup.fill_cache(MODEL, quiet, told.append).n_compiled == 1
    assert told == [1]
    code, out, err = run("--model", MODEL)
    assert (code, out.startswith("1 kernels compiled, ")) == (0, True)
    assert err.count("compiling kernels, once for each installation\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.gguf", "absent.gguf: No such file"), ("llama.npz", "not a whole GGUF file")],
)
def test_a_model_that_cannot_be_used_is_one_line_and_exit_1(run, name, message):
    code, out, err = run("--model", str(pathlib.Path(MODEL).with_name(name)))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_a_cache_that_no_other_process_would_find_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").touch()
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, strata.__file__, "warmup", "--model", modelfile.embedded_model()]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "strata: no folder for compiled kernels can be written: set XDG_CACHE_HOME to one that can\n"


def test_a_cache_that_cannot_be_written_any_more_is_told(monkeypatch, run):
    load_engine = warmup.Engine.load
    monkeypatch.setattr(jit.KERNELS, "failure", "")

    def fail_behind(options, log):
        jit.KERNELS.failure = "the folder cannot be written (No space left on device)"
        return load_engine(options, log)

    monkeypatch.setattr(warmup.Engine, "load", fail_behind)
    code, out, err = run("--model", MODEL)
    assert (code, out) == (1, "")
    assert err.endswith("strata: the folder cannot be written (No space left on device)\n")


def test_a_trial_file_that_cannot_be_written_is_told(monkeypatch, run, tmp_path):
    monkeypatch.setattr(jit.KERNELS, "path", str(tmp_path / "absent"))
    code, out, err = run("--model", MODEL)
    assert (code, out) == (1, "")
    assert "a session file cannot be written for a trial: " in err
