"""Whole processes of `strata --serve` driven through pipes: a conversation that outlives the one that held it."""

import json
import os
import resource
import signal
import subprocess
from typing import NamedTuple

import pytest

from given_engine import MODELS, ask, ids, joined, new_session, tree
from given_engineprocess import PATIENCE_S, command, gen
from sessionfile import verify_session
from verbs import TERMINAL_WORDS


class Talk(NamedTuple):
    """What one process answered, from READY on."""

    code: int
    lines: list[str]
    log: str

    @property
    def terminal(self) -> list[str]:
        """The last line of every command."""
        return [line for line in self.lines if line.split()[0] in TERMINAL_WORDS]

    def tokens(self, number: int = 0) -> list[int]:
        """The tokens of the number-th GEN that was answered."""
        answers = "\n".join(self.lines).split("\nRESUME")[number + 1]
        return [int(line[2:]) for line in answers.split("\nDONE")[0].splitlines() if line.startswith("T ")]

    def reused(self, number: int = 0) -> int:
        return [int(line.split()[1]) for line in self.lines if line.startswith("RESUME")][number]


def talk(script: str | bytes, model: str, folder, *flags: str, env=None) -> Talk:
    """Run a process over a whole input; the lines before READY must be INFO."""
    script = script.encode() if isinstance(script, str) else script
    process = subprocess.run(
        command(model, folder, *flags), input=script, capture_output=True, timeout=PATIENCE_S, env=env, check=False
    )
    lines, log = process.stdout.decode().splitlines(), process.stderr.decode()
    start = next(number for number, line in enumerate(lines) if line.startswith("READY "))
    assert all(line.startswith("INFO ") for line in lines[:start]), log
    return Talk(process.returncode, lines[start:], log)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sessions"


@pytest.fixture
def child(folder):
    """Starts processes whose lines are read one by one; ends those that are left."""
    children = []

    def start(model: str, *flags: str):
        pipe = subprocess.PIPE
        process = subprocess.Popen(command(model, folder, *flags), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        children.append(process)
        return process

    yield start
    for process in children:
        process.kill()
        process.communicate()


def send(process, text: str) -> None:
    process.stdin.write(text.encode())
    process.stdin.flush()


def read_to(process, word: str) -> list[str]:
    """The words of the next line that starts with `word`."""
    for line in process.stdout:
        if line.decode().startswith(f"{word} "):
            return line.decode().split()
    raise AssertionError(f"the process ended without a line {word}")


# --- a conversation goes on in another process


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"kv": "fp16"}),
        ("qwen35", {"kv": "int8"}),
        ("qwen4exp", {"kv": "k8v4", "spec": 4}),
        ("qwen4exp", {"kv": "q4_0", "spec": 1}),
    ],
)
def test_a_second_process_goes_on_where_the_first_one_ended(model, options, folder):
    flags = [f"--{name}={value}" for name, value in options.items()]
    first = talk(gen(ids(40)) + "SAVE a.bin\nQUIT\n", model, folder, *flags)
    answer = first.tokens()
    prompt = joined(ids(40), answer, ids(9, 1))
    second = talk("RESTORE a.bin\n" + gen(prompt) + "QUIT\n", model, folder, *flags)
    assert (first.code, second.code) == (0, 0)
    n_held = 40 + len(answer) - 1
    size = (folder / "a.bin").stat().st_size
    assert first.terminal[1].split()[:3] == ["SAVED", str(n_held), str(size)]
    assert second.terminal[0].split()[:3] == ["RESTORED", str(n_held), str(size)]
    assert second.reused() == n_held
    control = new_session(model, **options)
    assert ask(control, ids(40), 16).tokens == answer
    both = ask(control, prompt, 16)
    assert second.tokens() == both.tokens
    done = second.terminal[1].split()
    assert [int(done[place]) for place in (1, 2, 6, 7, 8)] == [
        both.done.n_generated, len(prompt), both.done.n_drafts_accepted, both.done.n_drafts_offered, n_held,
    ]  # fmt: skip
    assert verify_session(str(folder / "a.bin")).image.live.n_tokens == n_held


@pytest.mark.processes
def test_one_process_that_did_both_gives_the_same_tokens(folder):
    """Three processes: the tokens of a restored conversation are those of one that was never interrupted."""
    first = talk(gen(ids(40)) + "SAVE a.bin\nQUIT\n", "qwen4exp", folder)
    prompt = joined(ids(40), first.tokens(), ids(9, 1))
    second = talk("RESTORE a.bin\n" + gen(prompt), "qwen4exp", folder)
    both = talk(gen(ids(40)) + gen(prompt), "qwen4exp", folder)
    assert second.tokens() == both.tokens(1)
    assert second.reused() == both.reused(1)


# --- refusals


@pytest.mark.processes
def test_refused_restores_leave_the_live_conversation_answering(folder):
    first = talk("SAVE early.bin\n" + gen(ids(40)) + "SAVE a.bin\n", "qwen4exp", folder)
    assert [line.split()[:3] for line in first.terminal[:1]] == [["SERR", "invalid", "0"]]
    assert sorted(tree(folder)) == ["a.bin"]
    good = (folder / "a.bin").read_bytes()
    (folder / "cut.bin").write_bytes(good[:-1])
    (folder / "flipped.bin").write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    (folder / "foreign.bin").write_bytes(b"GGUF" + good[4:])
    (folder / "empty.bin").write_bytes(b"")
    (folder / "link.bin").symlink_to("a.bin")
    (folder / "folder.bin").mkdir()
    for number, session in enumerate([new_session("qwen4exp", kv="int8"), new_session("qwen35")]):
        ask(session, ids(40), 16)
        session.save(str(folder / f"other{number}.bin"))
    files = tree(folder)
    bad = [name for name in files if name != "a.bin"]
    assert len(bad) == 8
    prompt = joined(ids(40), first.tokens(), ids(9, 1))
    script = gen(ids(40)) + "".join(f"RESTORE {name}\n" for name in [*bad, "missing.bin"]) + gen(prompt)
    then = talk(script, "qwen4exp", folder)
    assert then.code == 0
    kinds = [line.split()[:3] for line in then.terminal[1:-1]]
    assert kinds == [["SERR", "invalid", "0"]] * 8 + [["SERR", "io", "0"]]
    control = new_session("qwen4exp")
    ask(control, ids(40), 16)
    assert then.tokens(1) == ask(control, prompt, 16).tokens
    assert then.reused(1) == 55
    assert tree(folder) == files


@pytest.mark.processes
def test_bad_models_and_options_end_with_one_line_and_exit_code_1(tmp_path):
    whole = (MODELS / "llama.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.gguf").write_text("not a model\n" * 100)
    for model in (tmp_path / "cut", tmp_path / "foreign", tmp_path / "missing"):
        process = subprocess.run(
            command(str(model), tmp_path / "s"), input=b"", capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert process.returncode == 1
        assert process.stdout == b""
        assert len(process.stderr.decode().splitlines()) == 1
        assert f"{model.name}.gguf" in process.stderr.decode()


# --- paths, line ends, the end of input


@pytest.mark.processes
def test_names_of_every_script_in_a_bare_locale(folder):
    """UTF-8 names, blanks and a carriage return, in the C locale and with an open umask."""
    names = ["日本.bin", "a b.bin", "é.bin", "e\u0301.bin", "🙂.bin", "z" * 196 + ".bin"]
    script = gen(ids(20), 4) + "".join(f"SAVE {name}\r\n" for name in names) + f"RESTORE {names[0]}\r\nSAVE half"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    previous = os.umask(0)
    try:
        result = talk(script, "llama", folder, env=env | {"LC_ALL": "C"})
    finally:
        os.umask(previous)
    assert result.code == 0
    assert [line.split()[0] for line in result.terminal] == ["DONE", *["SAVED"] * 6, "RESTORED", "SERR"]
    assert sorted(os.listdir(os.fsencode(folder))) == sorted(name.encode() for name in names)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert len({path.read_bytes() for path in folder.iterdir()}) == 1


@pytest.mark.processes
def test_stats_and_refused_lines_keep_the_process_in_step(folder):
    script = "\nHELLO\ngen 4 1\nGEN\nGEN 4 1,99999\nSAVE\nSTOP\n" + gen(ids(20), 4) + "STATS\n" + gen(ids(240), 9)
    result = talk(script, "qwen4exp", folder)
    assert result.code == 0
    words = [line.split()[0] for line in result.terminal]
    assert words == ["ERR"] * 5 + ["SERR", "DONE", "STATS", "ERR"]
    assert json.loads(result.terminal[7].removeprefix("STATS "))["held_tokens"] == 23
    assert "240 prompt tokens + 9 new ones + 8 do not fit the context of 256" in result.terminal[8]


# --- STOP, closed pipes, killed processes


@pytest.mark.processes
def test_stop_ends_a_running_answer_and_what_was_said_is_held(child):
    process = child("qwen4exp", "--max-context=4096")
    send(process, gen(ids(30), 4000))
    said = [int(read_to(process, "T")[1])]
    send(process, "STOP\n")
    for line in process.stdout:
        word, value, *rest = line.decode().split()
        if word == "DONE":
            break
        said.append(int(value))
    assert (int(value), rest[3]) == (len(said), "cancel")
    assert len(said) < 4000
    send(process, gen(joined(ids(30), said, ids(5)), 4) + "QUIT\n")
    assert int(read_to(process, "RESUME")[1]) == 30 + len(said) - 1
    assert read_to(process, "DONE")[5] == "length"
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.processes
def test_a_save_whose_reader_goes_away_leaves_a_whole_file_or_none(child, folder):
    process = child("qwen4exp")
    send(process, gen(ids(40)))
    read_to(process, "DONE")
    send(process, "SAVE a.bin\n")
    read_to(process, "SWAIT")
    process.stdout.close()
    send(process, "STATS\n")
    assert process.wait(PATIENCE_S) != 0
    process.stdout = None
    for path in folder.iterdir():
        verify_session(str(path))


@pytest.mark.processes
@pytest.mark.parametrize("n_saves", [1, 7])
def test_a_process_killed_while_it_saves_leaves_the_last_whole_file(n_saves, child, folder):
    process = child("qwen4exp")
    send(process, gen(ids(40)) + "SAVE a.bin\n" * 300)
    for _ in range(n_saves):
        read_to(process, "SAVED")
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    names = sorted(path.name for path in folder.iterdir())
    assert names[-1] == "a.bin"
    assert all(name.startswith(".a.bin.") and name.endswith(".tmp") for name in names[:-1])
    assert verify_session(str(folder / "a.bin")).image.live.n_tokens == 55


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="this system sets no limits of other processes")
@pytest.mark.parametrize("verb", ["SAVE", "AUTOSAVE", "RESTORE"])
def test_a_transfer_without_address_space_is_refused_and_the_conversation_goes_on(verb, child, folder):
    """A real limit on the process, below what it has; it is lifted afterwards."""
    process = child("qwen4exp")
    send(process, gen(ids(40), 8) + "SAVE a.bin\n")
    read_to(process, "SAVED")
    before = (folder / "a.bin").read_bytes()
    (_, most) = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (64 << 20, most))
    send(process, f"{verb} a.bin\n")
    assert read_to(process, "SERR")[1:3] == ["memory", "0"]
    assert (folder / "a.bin").read_bytes() == before
    assert os.listdir(folder) == ["a.bin"]
    resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
    send(process, f"{verb} a.bin\n" + gen(joined(ids(47), ids(5)), 4) + "QUIT\n")
    assert read_to(process, "RESTORED" if verb == "RESTORE" else "SAVED")[1] == "47"
    assert process.wait(PATIENCE_S) == 0
