"""The HTTP options of `strata --serve`, and what the front shows on its terminal."""

import contextlib
import io
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from rich.console import Console

import httpfront
import strata
from given_enginefront import MODEL, QUICK, EngineFront
from given_front import RunningFront, write_tokenizer_model
from httpfront import FrontOptions, Terminal
from httplines import SessionProgress
from options import HttpOptions, OptionRefused

STRATA = str(pathlib.Path(strata.__file__))


def from_flags(folder: str | None = "saved", **flags) -> FrontOptions:
    return FrontOptions.from_flags("a.gguf", folder, HttpOptions(**({"http": "8080"} | flags)))


@pytest.mark.parametrize(
    ("flags", "host", "port"),
    [
        ({"http": "8080"}, "127.0.0.1", 8080),
        ({"http": ":0"}, "127.0.0.1", 0),
        ({"http": "8080", "host": "0.0.0.0"}, "0.0.0.0", 8080),
        ({"http": "box.lan:80"}, "box.lan", 80),
        ({"http": "[::1]:80"}, "::1", 80),
    ],
)
def test_addresses(flags, host, port):
    options = from_flags(**flags)
    assert (options.access.host, options.port) == (host, port)


def test_lists_are_separated_by_commas():
    access = from_flags(trusted_origin="https://A.example, http://b:1", allowed_host="x,y").access
    assert access.trusted_origins == ("https://a.example", "http://b:1")
    assert access.allowed_hosts == ("x", "y")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"http": "http"}, "--http"),
        ({"http": "65536"}, "--http"),
        ({"http": "-1"}, "--http"),
        ({"http": "box:"}, "--http"),
        ({"http": "a:1", "host": "b"}, "give one of them"),
        ({"api_key": "two words"}, "--api-key"),
        ({"api_key": "schlüssel"}, "--api-key"),
        ({"trusted_origin": "https://a.example/"}, "--trusted-origin"),
        ({"trusted_origin": "*"}, "--trusted-origin"),
        ({"trusted_origin": "https://a.example,"}, "--trusted-origin"),
        ({"allowed_host": ","}, "--allowed-host"),
        ({"session_restore_at_start": "../a.bin"}, "--session-restore-at-start"),
        ({"session_save_at_exit": "a/b"}, "--session-save-at-exit"),
        ({"session_save_at_exit": "x" * 200}, "--session-save-at-exit"),
        ({"api_key": "a", "api_key_file": "b"}, "give one of them"),
        ({"api_key_file": "/nonexistent/key"}, "--api-key-file: '/nonexistent/key' cannot be read"),
        ({"api_key_file": "/"}, "--api-key-file"),
        ({"api_key_file": "/dev/null"}, "--api-key-file"),
    ],
)
def test_refused_options_are_named(flags, text):
    with pytest.raises(OptionRefused, match=re.escape(text)):
        from_flags(**flags)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_text("sesame\n")
    assert from_flags(api_key_file=str(path)).access.api_key == "sesame"
    assert from_flags().access.api_key is None
    monkeypatch.setenv("STRATA_API_KEY", "mellon")
    assert from_flags().access.api_key == "mellon"
    assert from_flags(api_key_file=str(path)).access.api_key == "sesame"
    assert from_flags(api_key="friend").access.api_key == "friend"
    for text in ("", "\n", "two words", "two\nlines", "x" * 5000):
        path.write_text(text)
        with pytest.raises(OptionRefused, match="--api-key-file"):
            from_flags(api_key_file=str(path))
    monkeypatch.setenv("STRATA_API_KEY", "")
    with pytest.raises(OptionRefused, match="STRATA_API_KEY"):
        from_flags()


def test_the_key_reaches_neither_the_child_nor_the_log(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(httpfront, "serve", lambda options, command: started.append((options, command)) or 0)
    key = tmp_path / "key"
    key.write_text("sesame")
    run = ["--serve", "--http", "0", "--model", "a.gguf"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"api_key": "sesame"}))
    for flags, warned in (
        (["--api-key", "sesame"], True),
        (["--api-key-file", str(key)], False),
        (["--config", str(config)], False),
    ):
        assert strata.main([*run, *flags]) == 0
        options, command = started.pop()
        assert options.access.api_key == "sesame"
        assert "sesame" not in " ".join(command)
        said = capsys.readouterr().err
        assert ("list of processes" in said) == warned
        assert "sesame" not in said


def test_the_key_is_not_in_the_environment_of_the_child(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATA_API_KEY", "mellon")
    code = "import os; print(f'INFO key={os.environ.get(\"STRATA_API_KEY\")}\\nREADY 10 stop', flush=True); input()"
    model = write_tokenizer_model(tmp_path / "tiny.gguf")
    with RunningFront(tmp_path, model, command=[sys.executable, "-c", code]) as front:
        assert front.get("/props").json()["engine"]["key"] == "None"


def test_a_folder_whose_name_no_line_can_carry():
    with pytest.raises(OptionRefused, match="--slot-save-path"):
        from_flags("saved\udcff")


def test_sessions_at_start_and_exit_need_a_folder():
    for flag in ("session_restore_at_start", "session_save_at_exit"):
        with pytest.raises(OptionRefused, match="--slot-save-path"):
            from_flags(None, **{flag: "a.bin"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--api-key", "x"], "--api-key without --http"),
        (["--http", "nowhere"], "--http"),
        (["--http", "1", "--sesion-save-at-exit", "a.bin"], "--sesion-save-at-exit"),
        (["--http", "1", "--engine-silence-s", "0"], "--engine-silence-s"),
        (["--http", "1", "--session-save-at-exit", "a.bin"], "--slot-save-path"),
    ],
)
def test_wrong_usage_is_exit_2(capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        strata.main(["--serve", "--model", "a.gguf", *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_the_config_file_takes_the_same_names(tmp_path, capsys):
    config = tmp_path / "strata.json"
    config.write_text(json.dumps({"model": "a.gguf", "host": "::1", "session_save": "a.bin"}))
    with pytest.raises(SystemExit):
        strata.main(["--serve", "--http", "1", "--config", str(config)])
    assert "unknown key 'session_save'" in capsys.readouterr().err
    config.write_text(json.dumps({"model": "a.gguf", "host": "::1", "session_save_at_exit": "a/b"}))
    with pytest.raises(SystemExit):
        strata.main(["--serve", "--http", "1", "--config", str(config)])
    assert "--session-save-at-exit needs --slot-save-path" in capsys.readouterr().err


@pytest.mark.processes
def test_the_command_line_end_to_end(tmp_path):
    """A conversation survives the server: saved at exit, restored at start, its options in a config file."""
    config = tmp_path / "strata.json"
    names = {"session_restore_at_start": "a.bin", "session_save_at_exit": "a.bin"}
    config.write_text(json.dumps({"model": MODEL, "slot_save_path": str(tmp_path / "new" / "saved"), **names}))
    command = [sys.executable, STRATA, "--serve", "--http", "0", "--config", str(config), *QUICK]
    held = []
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            lines: list[str] = []
            reader = threading.Thread(target=lambda stream=process.stderr, lines=lines: lines.extend(stream))
            reader.start()
            try:
                with contextlib.closing(client_of(process, lines)) as client:
                    held.append(client.get("/slots").json()[0]["n_prompt_tokens"])
                    answer = client.post("/completion", json={"prompt": [40, 41, 42] * 20, "n_predict": 4})
                    assert answer.status_code == 200
                process.send_signal(signal.SIGTERM)
                assert process.wait(EngineFront.deadline_s) == 0
            finally:
                process.kill()
                reader.join()
            assert any(line.startswith("save 'a.bin': 63 tokens") for line in lines)
    assert held == [0, 63]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def client_of(process, lines: list[str]) -> httpx.Client:
    """A client of a server that has come up."""
    RunningFront.wait_for(lambda: lines or process.poll() is not None, "the address")
    url = re.search(r"http://\S+", lines[0])[0]
    client = httpx.Client(base_url=url, timeout=EngineFront.deadline_s)
    EngineFront.wait_for(lambda: client.get("/health").status_code == 200, "health")
    return client


def test_progress_is_one_line_on_a_terminal_and_nothing_in_a_file():
    for is_terminal in (True, False):
        file = io.StringIO()
        terminal = Terminal(Console(file=file, force_terminal=is_terminal, width=100))
        progress = SessionProgress("save", "[b]chat1.bin", "capture")
        terminal.watch(progress)
        progress.done_bytes, progress.total_bytes = 5 << 20, 10 << 20
        terminal.watch(progress)
        terminal.watch(None)
        terminal.watch(None)
        terminal.log("[red]as it is[/red] " + "x" * 200)
        terminal.log("\x1b[2J\x9b\r\ngone")
        shown = file.getvalue()
        assert ("save [b]chat1.bin capture" in shown) == is_terminal
        assert ("10.0 MiB" in shown) == is_terminal
        assert "[red]as it is[/red] " + "x" * 200 in shown
        assert "\\x1b[2J\\x9b  gone\n" in shown
