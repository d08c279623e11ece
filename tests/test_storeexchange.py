"""Conversations of a store as session files and back: byte for byte what SAVE writes, and nothing else gets through."""

import json

import pytest

import storeflush
import strata
from engine import Engine, Session
from given_engine import MODELS, TURN, ask, ids, joined, next_turn, storing_session, trunk
from options import EngineOptions

CASES = [
    ("llama", {}),
    ("qwen35", {"kv": "k8v4"}),
    ("qwen3next", {"activations": "float"}),
    ("qwen4exp", {"kv": "int8", "spec": 4}),
    ("qwen4exp-8layers", {"kv": "q4_0", "spec": 1}),
]
FLAGS = {"kv": "--kv", "spec": "--spec", "activations": "--activations"}


def flags(name: str, options: dict) -> list[str]:
    given = {"--model": MODELS / f"{name}.gguf", "--max-context": 1024, "--session-min-free-mib": 0}
    given |= {FLAGS[key]: value for key, value in options.items()}
    return [f"{flag}={value}" for flag, value in given.items()]


def run(*words) -> int:
    return strata.main(["store", *map(str, words)])


def session(tmp_path, name="llama", **options) -> Session:
    return storing_session(tmp_path / "store", name, **({"store_replay_s": 2} | options))


def talk(chat: Session, turns: int, seed: int = 0):
    """Turns with time to rest behind each; returns the prompt behind them."""
    prompt = joined(TURN, ids(70, seed + 40), TURN, ids(230, seed))  # the first turn is a system prompt
    for turn in range(turns):
        prompt = next_turn(prompt, ask(chat, prompt, 6, label=f"chat {seed}"), seed + turn + 1)
        chat.rest(lambda: False)
    return prompt


def listed(folder, capsys) -> list[dict]:
    capsys.readouterr()
    assert run("list", folder, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_exported_file_is_byte_for_byte_what_save_writes(name, options, turns, tmp_path, capsys):
    chat = session(tmp_path, name, **options)
    talk(chat, turns)
    chat.save(str(tmp_path / "saved.bin"))
    (entry,) = listed(tmp_path / "store", capsys)
    assert run("export", tmp_path / "store", entry["id"], tmp_path / "exported.bin", *flags(name, options)) == 0
    assert (tmp_path / "exported.bin").read_bytes() == (tmp_path / "saved.bin").read_bytes()
    assert f"{chat.n_tokens} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "options"), CASES[1:])
def test_what_no_state_is_kept_behind_is_read_again_for_an_exported_file(name, options, tmp_path, capsys, monkeypatch):
    """As of large states, of which the one before the answer is worth its bytes and the one at its end is not."""
    monkeypatch.setattr(storeflush, "worth_keeping", lambda offers, *_: offers[1:])  # they begin with the end
    chat = session(tmp_path, name, **options)
    prompt = talk(chat, 2)
    chat.save(str(tmp_path / "saved.bin"))
    (entry,) = listed(tmp_path / "store", capsys)
    assert entry["states"][0] < entry["n_tokens"] == chat.n_tokens
    arguments = [entry["id"], tmp_path / "exported.bin", *flags(name, options)]
    assert run("export", tmp_path / "store", *arguments) == 0
    assert "read again" in capsys.readouterr().err
    assert (tmp_path / "exported.bin").read_bytes() == (tmp_path / "saved.bin").read_bytes()
    again = session(tmp_path, name, **options)
    reply = ask(again, prompt, 8)
    assert (reply.tokens, reply.reused) == (ask(chat, prompt, 8).tokens, entry["states"][0])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_imported_file_is_resumed_to_the_same_bits(name, options, tmp_path, capsys):
    chat = session(tmp_path, name, **options)
    prompt = talk(chat, 2)
    chat.save(str(tmp_path / "saved.bin"))
    n_held, expected = chat.n_tokens, ask(chat, prompt, 8).tokens
    assert run("import", tmp_path / "new" / "store", tmp_path / "saved.bin", *flags(name, options), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["n_tokens"] == n_held
    again = session(tmp_path / "new", name, **options)
    reply = ask(again, prompt, 8)
    assert (reply.tokens, reply.reused) == (expected, n_held)
    assert trunk(again) == trunk(chat)
    assert run("export", tmp_path / "new" / "store", said["id"], tmp_path / "again.bin", *flags(name, options)) == 0
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "saved.bin").read_bytes()


def test_one_of_several_is_meant_by_the_first_digits_of_its_id(tmp_path, capsys):
    chat = session(tmp_path)
    for seed in (0, 500):
        talk(chat, 1, seed)
    entries = listed(tmp_path / "store", capsys)
    assert [entry["label"] for entry in entries] == ["chat 500", "chat 0"]
    for entry in entries:
        path = tmp_path / entry["label"]
        assert run("export", tmp_path / "store", entry["id"][:6], path, *flags("llama", {}), "--json") == 0
        assert json.loads(capsys.readouterr().out)["n_tokens"] == entry["n_tokens"]


def test_what_a_longer_conversation_begins_with_is_found_in_that(tmp_path, capsys):
    chat = session(tmp_path)
    prompt = talk(chat, 1)
    chat.save(str(tmp_path / "short.bin"))
    ask(chat, prompt, 6)
    chat.rest(lambda: False)
    (entry,) = listed(tmp_path / "store", capsys)
    assert run("import", tmp_path / "store", tmp_path / "short.bin", *flags("llama", {}), "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == entry["id"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "no conversation begins with the id 'ffff'"),
        ("short", "no conversation begins with the id"),
        ("other format", "of another model or of other settings"),
        ("other model", "of another model or of other settings"),
        ("context", "for --max-context 256 has fewer"),
        ("damage", "missing or damaged"),
        ("folder", "there is no such folder"),
        ("no model", "No such file"),
        ("target", "is no session file"),
    ],
)
def test_what_cannot_be_exported_is_told_and_nothing_is_written(what, words, tmp_path, capsys):
    talk(session(tmp_path), 1)
    (entry,) = listed(tmp_path / "store", capsys)
    name, model, given, folder, target = entry["id"], "llama", [], tmp_path / "store", tmp_path / "out.bin"
    match what:
        case "nothing":
            name = "ffff"
        case "short":
            name = name[:3]
        case "other format":
            given = ["--activations", "float"]
        case "other model":
            model = "qwen3next"
        case "context":
            given = ["--max-context", "256"]
        case "damage":
            path = folder / entry["file"]
            path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        case "folder":
            folder = tmp_path / "nowhere"
        case "no model":
            model = "nowhere"
        case "target":
            target.write_text("a letter")
    assert run("export", folder, name, target, *flags(model, {}), *given) == 1
    assert words in capsys.readouterr().err
    assert not target.exists() or target.read_text() == "a letter"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_of_other_settings_or_a_damaged_one_is_not_imported(tmp_path, capsys):
    chat = session(tmp_path)
    talk(chat, 1)
    chat.save(str(tmp_path / "saved.bin"))
    data = bytearray((tmp_path / "saved.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged.bin").write_bytes(data)
    for path, given in ((tmp_path / "saved.bin", ["--activations", "float"]), (tmp_path / "damaged.bin", []),
                        (tmp_path / "nowhere.bin", [])):  # fmt: skip
        assert run("import", tmp_path / "new", path, *flags("llama", {}), *given) == 1
        assert "strata: " in capsys.readouterr().err
    assert listed(tmp_path / "new", capsys) == []


def test_an_engine_without_weights_identifies_itself_as_one_with_them():
    for name, options in CASES:
        settings = EngineOptions(model=str(MODELS / f"{name}.gguf"), backend="cpu", max_context=512, **options)
        assert Engine.outline(settings).identity() == Engine.load(settings).identity()
    device = EngineOptions(model=str(MODELS / "llama.gguf"), backend="cuda", kv_resident=20480)
    assert dict(Engine.outline(device).identification.configuration._asdict())["backend"] == "cuda"
