"""The command line: options of --serve from flags and config files, text filters, messages and exit codes."""

import io
import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

import modelfile
import options
import strata
from given_tokenizer import IM_END, IM_START, TOKENS, write_model

BASE = ["--serve", "--model", "m.gguf"]


def settings(*args: str) -> options.EngineOptions:
    """The engine's options that a command line gives."""
    return options.read_options(strata.get_parser().parse_args(["--serve", *args]))[0]


def usage_error(capsys, *args: str) -> str:
    """The message of a command line that exits with 2."""
    with pytest.raises(SystemExit) as caught:
        strata.main(list(args))
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.fixture
def config(tmp_path):
    """Writes a config file and returns its path."""

    def write(content) -> str:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


# --- Options of --serve ---


def test_a_flag_wins_over_the_config_file_and_that_over_the_default(config):
    path = config({"kv": "int8", "threads": 3, "prompt_cache": 0})
    given = settings("--config", path, "--threads", "2")
    assert given == options.EngineOptions(threads=2, kv="int8", prompt_cache=0)


def test_the_config_file_may_name_the_model(config):
    assert settings("--config", config({"model": "other.gguf"})).model == "other.gguf"


@pytest.mark.parametrize("number", ["-1", "2.0", "2147483648", "9" * 5000, "", " 1", "1_0", "٣", "0x10", "1e3"])
def test_what_is_no_number_of_32_bits_is_refused(capsys, number):
    assert "is not a whole number from 0 to 2147483647" in usage_error(capsys, *BASE, f"--kv-resident={number}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kv", "q8"], "'q8' is none of fp16, int8, q4_0, k8v4"),
        (["--backend", "hip"], "'hip' is none of auto, cpu, cuda"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--max-contex", "5"], "unrecognized arguments: --max-contex"),
        (["--max-contex=5"], "unrecognized arguments: --max-contex=5"),
        (["stray"], "unrecognized arguments: stray"),
        (["--control-vector", ""], "must not be empty"),
        (["--expert-profile-save", ""], "'' is no name of a file"),
        (["--expert-cache-mib", "all"], "'all' is not a whole number from 0"),
        (["--layer-split", "1,2"], "one slot, one device"),
        (["--layer-split"], "one slot, one device"),
        (["--peer-device=1"], "one slot, one device"),
        (["tokenize", "--model", "m"], "unrecognized arguments: tokenize"),
    ],
)
def test_what_does_not_exist_stops_the_start_with_its_name(capsys, args, message):
    assert message in usage_error(capsys, *BASE, *args)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"max_contex": 5}, "unknown key 'max_contex'"),
        ({"max-context": 5}, "unknown key 'max-context'"),
        ({"serve": True}, "unknown key 'serve'"),
        ({"max_context": "5"}, 'max_context must be a whole number, found "5"'),
        ({"max_context": 5.0}, "max_context must be a whole number, found 5.0"),
        ({"max_context": True}, "max_context must be a whole number, found true"),
        ({"max_context": None}, "max_context must be a whole number, found null"),
        ({"max_context": 0}, "max_context: '0' is not a whole number from 1"),
        ({"threads": 10**30}, "threads: "),
        ({"kv": 8}, "kv must be a string, found 8"),
        ({"kv": "q8"}, "kv: 'q8' is none of"),
        ({"slot_save_path": ""}, "slot_save_path: an empty folder name"),
        ({"expert_profile_save": "a\0b"}, "expert_profile_save: 'a\\x00b' is no name of a file"),
        ({"layer_split": [1]}, "one slot, one device"),
        ({"peer_device": 1}, "one slot, one device"),
        ('{"kv": "int8", "kv": "fp16"}', "key 'kv' is given twice"),
        ("[]", "expected one JSON object"),
        ("null", "expected one JSON object"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"threads": ' + "9" * 5000 + "}", "not JSON"),
        (" " * (1 << 20) + "{}", "larger than"),
    ],
)
def test_a_bad_config_file_stops_the_start_with_the_key(capsys, config, content, message):
    printed = usage_error(capsys, *BASE, "--config", config(content))
    assert message in printed
    assert "config.json" in printed


def test_a_config_file_that_cannot_be_read_is_named(capsys, tmp_path):
    assert "absent.json: No such file" in usage_error(capsys, *BASE, "--config", str(tmp_path / "absent.json"))
    assert f"{tmp_path}: Is a directory" in usage_error(capsys, *BASE, "--config", str(tmp_path))
    (tmp_path / "latin1.json").write_bytes(b'{"kv": "\xe9"}')
    assert "not JSON" in usage_error(capsys, *BASE, "--config", str(tmp_path / "latin1.json"))


def test_a_config_file_may_start_with_a_byte_order_mark(config):
    assert settings("--config", config('\ufeff{"threads": 3}')).threads == 3


@pytest.mark.parametrize("command", [["--serve"], ["tokenize"], ["detokenize"], ["warmup"], ["demo"]])
def test_the_embedded_model_is_the_default(capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(modelfile, "EMBEDDED_MODEL", "absent.gguf")
    assert "no model comes with this installation: name a GGUF file with --model" in usage_error(capsys, *command)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name a command, or --serve"),
        (["--kv", "int8", "session", "list", "."], "--kv before a command: these belong to --serve"),
        (["--config", "c.json", "demo", "--model", "m"], "--config before a command"),
        (["--threads", "2", "warmup"], "--threads before a command"),
        (["warmup", "m.gguf"], "unrecognized arguments: m.gguf"),
        (["warmup", "--kv", "int8"], "unrecognized arguments: --kv int8"),
        (["session"], "required: VIEW"),
        (["session", "verify"], "required: FILE"),
        (["bogus"], "invalid choice: 'bogus'"),
    ],
)
def test_wrong_usage_says_what_is_wrong(capsys, args, message):
    assert message in usage_error(capsys, *args)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_one_with_nothing_behind_it(closed):
    """A supervisor may start a program so; the first file that it opened would get the stream's number."""
    command = f"echo 12 | {{ '{sys.executable}' '{strata.__file__}' detokenize {closed}; echo status $?; }}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.endswith("status 0\n")


def test_help_and_version(capsys):
    for args, text in ((["--help"], "--slot-save-path"), (["--version"], f"strata {options.VERSION}\n")):
        with pytest.raises(SystemExit) as caught:
            strata.main(args)
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


# --- The folder for session files ---


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path, umask):
    wanted = tmp_path / "a b" / "日本" / "чат"
    before = os.umask(umask)
    try:
        strata._create_folder("--slot-save-path", settings("--slot-save-path", f"{wanted}/").slot_save_path)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (wanted, *wanted.parents[:2])] == [0o700] * 3


def test_a_folder_becomes_absolute_and_links_are_followed_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert settings("--slot-save-path", "link/sub").slot_save_path == str(tmp_path / "real" / "sub")


def test_a_folder_that_exists_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o755)
    strata._create_folder("--slot-save-path", str(tmp_path))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "empty folder name"), ("  ", "empty folder name"), ("a\nb", "control characters"), ("a\x7f", "control char")],
)
def test_a_folder_name_that_is_a_mistake_stops_the_start(capsys, name, message):
    assert message in usage_error(capsys, *BASE, "--slot-save-path", name)


def test_a_file_in_the_place_of_the_folder_stops_the_start(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "file is not a folder" in usage_error(capsys, *BASE, "--slot-save-path", str(tmp_path / "file"))
    assert "Not a directory" in usage_error(capsys, *BASE, "--slot-save-path", str(tmp_path / "file" / "sub"))


# --- Text filters ---


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.gguf")


@pytest.fixture
def run(monkeypatch, capfdbinary):
    """Runs one command in this process; returns exit code, stdout and stderr."""

    def run_command(stdin: bytes, *args: str) -> tuple[int, bytes, bytes]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = strata.main(list(args))
        sys.stdout.flush()
        return code, *capfdbinary.readouterr()

    return run_command


@pytest.mark.parametrize("text", ["hello", "hello\r\n", "", "\n", "ß漢🎉 <|im_end|>\n\n", "\x00\x1b[0m"])
def test_text_through_both_filters_is_the_same_text(run, model, text):
    code, ids, _ = run(text.encode(), "tokenize", "--model", model)
    assert (code, ids.count(b"\n")) == (0, 1)
    assert run(ids, "detokenize", "--model", model)[:2] == (0, text.encode())


@pytest.mark.parametrize("text", ["hello", "hello\n", "hello\r\n"])
def test_chat_wraps_the_text_and_drops_its_last_line_end(run, model, text):
    _, line, _ = run(text.encode(), "tokenize", "--chat", "--model", model)
    ids = [int(word) for word in line.split()]
    assert (ids[0], ids.count(IM_START), ids.count(IM_END)) == (IM_START, 2, 1)
    _, shown, _ = run(line, "detokenize", "--model", model)
    assert shown == b"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_answers_become_text_and_other_lines_go_to_stderr(run, model):
    hello = TOKENS.index("hello")
    stdin = f"INFO kv=fp16\nRESUME 0\nT {hello}\nT 33\r\nT {IM_END}\nDONE 3 1\n\nSAVED 1 2 0.1\n1,2\x00\n".encode()
    code, text, rest = run(stdin, "detokenize", "--model", model)
    assert (code, text) == (0, b"hello!\n")
    assert rest == b"INFO kv=fp16\nRESUME 0\nDONE 3 1\n\nSAVED 1 2 0.1\n1,2\x00\n"


@pytest.mark.parametrize("line", ["104, 105", "104,105", "104 105", "104\n105", "104\nT 105", "  104\t105  "])
def test_plain_ids_come_in_many_forms(run, model, line):
    assert run(line.encode(), "detokenize", "--model", model) == (0, b"hi", b"")


def test_a_character_may_arrive_in_several_lines(run, model):
    assert run(b"T 195\nPP 1 1 1 1\nT 159\n240\n", "detokenize", "--model", model)[1] == "ß\ufffd".encode()


@pytest.mark.parametrize("token_id", [str(len(TOKENS)), "9" * 5000])
def test_an_id_outside_the_vocabulary_is_reported_and_the_rest_goes_on(run, model, token_id):
    code, text, rest = run(f"T 104\nT {token_id}\nT 105\n".encode(), "detokenize", "--model", model)
    assert (code, text) == (1, b"hi")
    assert b"outside the vocabulary of 265" in rest


def test_input_that_is_not_utf8_is_refused(run, model):
    code, out, message = run(b"ab\xff", "tokenize", "--model", model)
    assert (code, out) == (1, b"")
    assert b"standard input is not UTF-8: byte 0xff at offset 2" in message


def test_what_a_model_file_leaves_open_is_told_beside_the_ids(run, tmp_path):
    path = write_model(tmp_path / "open.gguf", template=None)
    code, out, message = run(b"hi", "tokenize", "--model", path)
    assert (code, out) == (0, b"104 105\n")
    assert message == b"strata: the model file has no chat template: chats are refused, plain prompts are not\n"


@pytest.mark.parametrize("command", [["tokenize"], ["detokenize"], ["tokenize", "--chat"], ["demo"]])
def test_a_file_without_a_tokenizer_is_refused_in_one_line(run, tmp_path, command):
    path = write_model(tmp_path / "bare.gguf", model="none")
    code, out, message = run(b"", *command, "--model", path)
    assert (code, out, message.count(b"\n")) == (1, b"", 1)
    assert b"bare.gguf: no tokenizer in this file" in message


def test_detokenize_writes_each_line_at_once(model):
    command = [sys.executable, strata.__file__, "detokenize", "--model", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as filter_:
        for token_id, text in ((104, b"h"), (105, b"i")):
            filter_.stdin.write(f"T {token_id}\n".encode())
            assert filter_.stdout.read(1) == text
        filter_.stdin.close()
        assert (filter_.stdout.read(), filter_.wait()) == (b"", 0)


@pytest.mark.parametrize("command", ["tokenize", "detokenize"])
def test_a_reader_that_has_gone_ends_a_filter_quietly(model, command):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [sys.executable, strata.__file__, command, "--model", model],
            input=b"104\n" * 10_000,
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, b"")


# --- The engine through the command line ---

MODELS = pathlib.Path(__file__).parent / "data" / "model"


def serve(stdin: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, strata.__file__, "--serve", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_serve_runs_the_engine_with_its_options(tmp_path):
    ran = serve("QUIT\n", "--model", str(MODELS / "llama.gguf"), "--max-context", "64", "--conversation-cache-mib", "7")
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    assert lines[-1] == "READY 64 stop"
    assert {"INFO conversation_cache_mib=7", "INFO context=64", f"INFO engine={options.VERSION}"} <= set(lines)


@pytest.mark.parametrize(
    ("model", "message"), [("absent.gguf", "absent.gguf: No such file"), ("llama.npz", "not a whole GGUF file")]
)
def test_a_model_that_cannot_be_used_is_one_line_and_exit_1(model, message):
    ran = serve("QUIT\n", "--model", str(MODELS / model))
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert message in ran.stderr


@pytest.mark.processes
def test_a_conversation_in_a_pipeline_survives(real_model, tmp_path):
    """The README's example, and its second half in another engine."""
    me = f"{sys.executable} {strata.__file__}"
    serve_ = f"{me} --serve --model $MODEL --slot-save-path $FOLDER --session-min-free-mib 0"
    script = f"""
        set -e -o pipefail
        ask() {{ printf 'GEN 8 '; echo 'Name a colour.' | {me} tokenize --model $MODEL --chat; }}
        {{ ask; echo 'SAVE chat1.bin'; }} | {serve_} | {me} detokenize --model $MODEL 2>$FOLDER/first
        {{ echo 'RESTORE chat1.bin'; ask; }} | {serve_} | {me} detokenize --model $MODEL 2>$FOLDER/second
    """
    environment = os.environ | {"MODEL": real_model, "FOLDER": str(tmp_path)}
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    first, second = ran.stdout.splitlines()
    assert first == second != ""
    saved = re.search(r"^SAVED (\d+) ", (tmp_path / "first").read_text(), re.MULTILINE)
    restored = re.search(r"^RESTORED (\d+) ", (tmp_path / "second").read_text(), re.MULTILINE)
    assert int(saved[1]) == int(restored[1]) > 8
    assert re.search(r"^RESUME [1-9]", (tmp_path / "second").read_text(), re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_by_unwinding(number, tmp_path):
    """So that a temporary folder goes with it."""
    with pytest.raises(SystemExit) as ended, strata._unwinding(), tempfile.TemporaryDirectory(dir=tmp_path):
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is signal.SIG_DFL
