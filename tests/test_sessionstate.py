"""SAVE and RESTORE of a live session: all that was held comes back, and a refusal leaves everything as it was."""

import dataclasses
import io
import os
import shutil

import numpy as np
import pytest

import engine as engine_module
import generation
import kvcache
import resources
import sessionstate
from cells import FORMATS
from engine import Session
from generation import FatalError
from given_engine import (
    MODELS,
    TURN,
    ask,
    draft_cells,
    held,
    ids,
    joined,
    marks,
    new_engine,
    new_session,
    next_turn,
    shared_engine,
    tree,
    trunk,
)
from given_images import seal
from given_session import talk
from serveloop import Answers, Loop
from sessionfile import inspect_session, verify_session
from sessionlayout import SessionError
from verbs import GenRequest, RequestError

COMBINATIONS = [
    ("llama", {}),
    *(("qwen35", {"kv": kv}) for kv in ("fp16", "int8", "q4_0", "k8v4")),
    *(("qwen4exp", {"kv": kv, "spec": spec}) for kv in ("fp16", "int8", "q4_0", "k8v4") for spec in (1, 4)),
    *(("qwen4exp-8layers", {"kv": kv}) for kv in ("fp16", "q4_0")),
    ("qwen3next", {}),
    ("qwen35moe", {}),
    ("qwen3", {}),
    ("qwen3moe", {}),
    ("qwen2", {}),
]
NAMED = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in COMBINATIONS]


# --- there and back


@pytest.mark.parametrize(("name", "options"), COMBINATIONS, ids=NAMED)
def test_a_restored_conversation_goes_on_as_if_nothing_had_happened(name, options, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "DRAFT_FLOOR", 0.0)
    path = str(tmp_path / "a.bin")
    stayed = new_session(name, **options)
    prompt = talk(stayed)
    saved = stayed.save(path)
    restored = Session(new_engine(name, **options))
    outcome = restored.restore(path)
    assert (outcome.n_tokens, outcome.size_bytes) == (saved.n_tokens, saved.size_bytes)
    assert outcome.n_tokens == stayed.n_tokens == restored.n_tokens
    assert outcome.size_bytes == os.path.getsize(path)
    assert held(restored)["live"] == held(stayed)["live"]
    answers = [ask(session, prompt, 16) for session in (stayed, restored)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].reused == outcome.n_tokens
    drafts = [(answer.done.n_drafts_accepted, answer.done.n_drafts_offered) for answer in answers]
    assert drafts[0] == drafts[1]
    assert (drafts[0][1] > 0) == (options.get("spec") == 4)
    fresh = Session(restored.engine)
    assert ask(fresh, prompt, 16).tokens == answers[0].tokens
    assert trunk(fresh) == trunk(stayed) == trunk(restored)
    if restored.cache.draft_pool:
        assert draft_cells(restored) == draft_cells(stayed)
    verify_session(path)


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen4exp"])
@pytest.mark.parametrize("n_prompt", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("max_new", [0, 1, 4])
def test_the_shortest_chats_come_back(name, n_prompt, max_new, tmp_path):
    session, restored = new_session(name), new_session(name)
    reply = ask(session, ids(n_prompt), max_new)
    session.save(str(tmp_path / "a.bin"))
    outcome = restored.restore(str(tmp_path / "a.bin"))
    assert outcome.n_tokens == n_prompt + max(max_new - 1, 0)
    prompt = joined(ids(n_prompt), reply.tokens, ids(5, 1))
    answers = [ask(s, prompt, 6) for s in (session, restored)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].reused == outcome.n_tokens
    assert trunk(session) == trunk(restored)


def test_a_save_changes_nothing_and_gives_the_same_bytes_again(live, tmp_path):
    session, prompt, good = live
    before = held(session)
    session.save(str(tmp_path / "again.bin"))
    assert (tmp_path / "again.bin").read_bytes() == good.read_bytes()
    assert held(session) == before
    control = new_session()
    talk(control)
    assert ask(session, prompt, 8).tokens == ask(control, prompt, 8).tokens
    assert session.stats()["counters"]["saves"] == 2


def test_what_was_restored_saves_to_the_same_bytes(live, tmp_path):
    _, _, good = live
    restored = new_session()
    restored.restore(str(good))
    restored.save(str(tmp_path / "again.bin"))
    assert (tmp_path / "again.bin").read_bytes() == good.read_bytes()


def test_a_file_holds_the_deepest_checkpoint_alone_and_every_layer(live):
    session, _, good = live
    image = inspect_session(str(good)).image
    assert len(marks(session)) == 2
    assert [checkpoint.n_tokens for checkpoint in image.checkpoints] == [marks(session)[-1]]
    assert image.live.n_tokens == session.n_tokens
    assert tuple(image.geometry) == session.engine.config.geometry
    assert (image.layer_lo, image.layer_hi, image.cvec) == (0, session.engine.config.n_layers, False)
    assert len(image.kv) == 2
    assert [layer.header.pooled_rows for layer in image.kv] == [session.n_tokens // 4 + 1, 0]


def test_the_checkpoint_of_a_file_serves_its_saved_prompt_again(live):
    _, prompt, good = live
    restored = new_session()
    restored.restore(str(good))
    last = restored.checkpoints.deepest()
    assert marks(restored) == [last.n_tokens]
    same = prompt[: int(np.flatnonzero(prompt == TURN)[-2]) + 10]
    reply = ask(restored, same[:-1], 5)
    assert 0 < reply.reused == last.n_tokens < len(same) - 1
    fresh = Session(restored.engine)
    assert ask(fresh, same[:-1], 5).tokens == reply.tokens
    assert trunk(fresh) == trunk(restored)


def test_a_conversation_survives_five_restarts(live, tmp_path):
    _, prompt, good = live
    seen = set()
    for _ in range(5):
        session = Session(new_engine("qwen4exp"))
        session.restore(str(good))
        session.save(str(good))
        reply = ask(session, prompt, 16)
        seen.add((reply.reused, *reply.tokens))
    assert len(seen) == 1


def test_a_longer_conversation_replaces_its_file(live):
    session, prompt, good = live
    for turn in (7, 8, 9):
        prompt = next_turn(prompt, ask(session, prompt, 6), turn)
    session.save(str(good))
    restored = new_session()
    assert restored.restore(str(good)).n_tokens == session.n_tokens
    assert ask(restored, prompt, 8).tokens == ask(session, prompt, 8).tokens


def test_a_restore_replaces_the_conversation_and_leaves_the_parked_ones(live):
    session, prompt, good = live
    expected = ask(new_session(), prompt, 8).tokens
    n_saved, n_parked = session.n_tokens, len(session.parking.entries)
    other = talk(session, seed=90)
    entries = list(session.parking.entries)
    assert len(entries) == n_parked + 1
    session.restore(str(good))
    assert session.parking.entries == entries  # what was live then is gone, as the parked ones are not
    assert (session.n_tokens, len(marks(session))) == (n_saved, 1)
    assert ask(session, prompt, 8).tokens == expected
    assert ask(session, other, 3).reused == 0


@pytest.mark.parametrize("mib", [None, 100, 0])
def test_a_short_conversation_in_between_leaves_the_restored_one(live, mib):
    """Parked where there is room, else the short one runs beside it."""
    _, prompt, good = live
    session = new_session(conversation_cache_mib=mib)
    n_saved = session.restore(str(good)).n_tokens
    ask(session, ids(40, 99), 5)
    assert (session.n_tokens, session.live.n_tokens) == (44, n_saved if mib == 0 else 44)
    assert ask(session, prompt, 5).reused == n_saved


def test_a_restored_conversation_can_be_parked_and_saved(live, tmp_path):
    _, prompt, good = live
    session = new_session(conversation_cache_mib=100)
    session.restore(str(good))
    ask(session, ids(40, 99), 5)
    reply = ask(session, prompt, 8)
    session.save(str(tmp_path / "b.bin"))
    again = new_session()
    again.restore(str(tmp_path / "b.bin"))
    prompt = next_turn(prompt, reply, 3)
    answers = [ask(s, prompt, 8) for s in (session, again)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].reused == len(prompt) - 10


@pytest.mark.parametrize("context", [61, 64])
def test_a_full_context_is_saved_restored_and_goes_no_further(context, tmp_path):
    session, restored = new_session(max_context=context), new_session(max_context=context)
    reply = ask(session, ids(30), context - 38)
    session.save(str(tmp_path / "a.bin"))
    assert restored.restore(str(tmp_path / "a.bin")).n_tokens == context - 9
    prompt = joined(ids(30), reply.tokens)
    with pytest.raises(RequestError, match=rf"{context - 8} prompt tokens \+ 1 .*context of {context}"):
        ask(restored, prompt, 1)
    assert restored.n_tokens == context - 9
    last = ask(restored, prompt, 0)
    assert (last.reused, last.tokens) == (context - 9, [])
    ask(session, prompt, 0)
    assert trunk(restored) == trunk(session)
    restored.save(str(tmp_path / "b.bin"))


def test_options_that_change_no_bit_of_state_do_not_change_the_identity(live, tmp_path):
    """A moved or linked model, another number of threads, other cache sizes: the file is welcome."""
    _, prompt, good = live
    shutil.copy(MODELS / "qwen4exp.gguf", tmp_path / "renamed.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "renamed.gguf")
    expected = ask(new_session(), prompt, 8, temperature=0.8, seed=5).tokens
    for changed in (
        {"model": str(tmp_path / "renamed.gguf")},
        {"model": str(tmp_path / "link.gguf")},
        {"threads": 2, "prompt_cache": 1, "prompt_cache_every": 8, "conversation_cache_mib": 9},
    ):
        model = changed.pop("model", None)
        engine = new_engine("qwen4exp", **changed) if model is None else loaded_from(model)
        session = Session(engine)
        session.restore(str(good))
        assert ask(session, prompt, 8, temperature=0.8, seed=5).tokens == expected


def loaded_from(path):
    options = dataclasses.replace(shared_engine("qwen4exp").options, model=path)
    engine = engine_module.Engine.load(options)
    engine.turn_start_id = TURN
    return engine


# --- what is told on the way


def test_progress_and_phases_of_a_save_and_a_restore(tmp_path):
    events = []
    report = {
        "progress": lambda done, total: events.append((done, total)),
        "phase": lambda name, size_bytes: events.append((name, size_bytes)),
    }
    session, restored = Session(new_engine("qwen4exp")), Session(new_engine("qwen4exp"))
    talk(session)
    size = session.save(str(tmp_path / "a.bin"), **report).size_bytes
    state_bytes = sum(session.cache.shape.state_sizes)
    assert events == [
        ("fingerprint", 2 << 20), ("capture", state_bytes), (0, size), (size, size), ("flush", size), ("publish", size),
    ]  # fmt: skip
    events.clear()
    session.save(str(tmp_path / "a.bin"), **report)
    assert events[0] == ("capture", state_bytes)  # the model's files are read once
    events.clear()
    restored.restore(str(tmp_path / "a.bin"), **report)
    assert events == [
        ("fingerprint", 2 << 20), (size, 2 * size), ("validate", size), ("transfer", size), (2 * size, 2 * size),
    ]  # fmt: skip


# --- refused saves


@pytest.mark.parametrize("why", ["start", "erased"])
def test_a_save_of_nothing_is_refused(why, tmp_path):
    session = new_session()
    if why == "erased":
        talk(session)
        session.erase()
    before = held(session)
    with pytest.raises(SessionError, match="nothing to save") as caught:
        session.save(str(tmp_path / "a.bin"))
    assert caught.value.kind == "invalid"
    assert tree(tmp_path) == {}
    assert held(session) == before


@pytest.mark.parametrize("how", ["cancelled", "unkept", "abandoned"])
def test_a_request_that_came_to_nothing_leaves_a_conversation_to_save(how, tmp_path):
    """Nothing is all or nothing: what was read is whole, and what was held before is a start of it."""
    session = new_session()
    prompt = talk(session)
    n_before, ids_before = session.n_tokens, session.held_ids().tolist()
    if how == "cancelled":
        ask(session, prompt, 4, stopped=lambda: True)
    elif how == "unkept":
        ask(session, prompt, 4, checkpoint=False)
    else:
        events = session.generate(GenRequest(prompt, 4))
        next(events)
        events.close()
    assert session.held_ids()[:n_before].tolist() == ids_before
    assert session.save(str(tmp_path / "a.bin")).n_tokens == session.n_tokens >= n_before
    restored = new_session()
    restored.restore(str(tmp_path / "a.bin"))
    assert ask(restored, prompt, 6).tokens == ask(new_session(), prompt, 6).tokens


def test_a_save_without_disk_room_is_refused_and_the_old_file_stays(live, refused, monkeypatch):
    session, _, good = live
    monkeypatch.setattr(
        session.engine, "options", dataclasses.replace(session.engine.options, session_min_free_mib=2**31 - 1)
    )
    refused("storage", "disk space", session.save, good)


def test_a_save_without_ram_above_the_floor_is_refused_before_the_disk_is_asked(live, refused, monkeypatch):
    session, _, good = live
    options = dataclasses.replace(session.engine.options, session_min_free_mib=2**31 - 1)
    monkeypatch.setattr(session.engine, "options", options)
    monkeypatch.setattr(resources, "available_bytes", lambda: 17 << 20)
    refused("memory", r"18 MiB of RAM are needed above a floor of 0 MiB, 17 MiB are available", session.save, good)


@pytest.mark.parametrize(
    ("path", "kind", "match"),
    [
        ("missing/a.bin", "io", "No such file"),
        ("good.bin/a.bin", "io", "Not a directory"),
        ("", "io", "file name"),
        (".", "io", "directory"),
    ],
)
def test_a_save_to_a_place_that_cannot_be_written_is_refused(path, kind, match, live, refused):
    session, _, good = live
    refused(kind, match, session.save, good.parent / path if path else f"{good.parent}/")


def test_a_save_replaces_a_link_and_leaves_its_target_alone(live):
    session, _, good = live
    outside = good.parent.parent / "outside.bin"
    outside.write_bytes(b"untouched")
    link = good.parent / "link.bin"
    link.symlink_to(outside)
    session.save(str(link))
    assert outside.read_bytes() == b"untouched"
    assert not link.is_symlink()
    assert link.read_bytes() == good.read_bytes()
    assert link.stat().st_mode & 0o777 == 0o600


# --- refused restores: the file


def cut(at):
    return lambda data: data[: at(len(data))]


def flip(at):
    def spoil(data):
        spoiled = bytearray(data)
        spoiled[at(len(data))] ^= 0x10
        return bytes(spoiled)

    return spoil


SPOILED = {
    **{f"cut to {n}": cut(lambda size, n=n: n) for n in (0, 7, 63, 64, 65, 200, 327)},
    "cut in half": cut(lambda size: size // 2),
    **{f"cut by {n}": cut(lambda size, n=n: size - n) for n in (1, 8, 16, 17)},
    **{f"bit at {n}": flip(lambda size, n=n: n) for n in (0, 8, 16, 24, 32, 40, 60, 64, 208, 224, 232, 240)},
    "bit in the middle": flip(lambda size: size // 2),
    **{f"bit at -{n}": flip(lambda size, n=n: size - n) for n in (1, 9, 17, 400)},
    "a byte more": lambda data: data + b"\0",
    "another file behind it": lambda data: data * 2,
    "GGUF": lambda data: b"GGUF" + data[4:],
    "text": lambda data: b"a shopping list, and nothing else\n" * 40,
    "zeros": lambda data: bytes(len(data)),
    "a later version": lambda data: seal(bytearray(data[:8] + b"\2" + data[9:])),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_damaged_file_is_refused(spoil, live, refused):
    session, _, good = live
    bad = good.parent / "bad.bin"
    bad.write_bytes(spoil(good.read_bytes()))
    refused("invalid", "expected .* found", session.restore, bad)


def test_what_is_no_plain_file_is_refused(live, refused):
    session, _, good = live
    folder = good.parent
    (folder / "link.bin").symlink_to(good)
    os.mkfifo(folder / "fifo.bin")
    (folder / "folder.bin").mkdir()
    shutil.copy(good, folder / "twice.bin")
    os.link(folder / "twice.bin", folder / "hard.bin")
    for name, match in (("link", "symbolic link"), ("fifo", "regular"), ("folder", "regular"), ("hard", "hard link")):
        before = held(session)
        with pytest.raises(SessionError, match=match) as caught:
            session.restore(str(folder / f"{name}.bin"))
        assert caught.value.kind == "invalid"
        assert held(session) == before
    (folder / "fifo.bin").unlink()  # a tree with a FIFO cannot be read
    refused("io", "No such file", session.restore, folder / "fifo.bin")


def test_a_restore_without_ram_above_the_floor_is_refused(live, refused, monkeypatch):
    session, _, good = live
    monkeypatch.setattr(resources, "available_bytes", lambda: 32 << 20)
    refused("memory", "MiB of RAM are needed above a floor of 0 MiB, 32 MiB are available", session.restore, good)


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_a_file_that_changes_between_its_two_readings_is_refused(damage, live, refused):
    session, _, good = live
    bad = good.parent / "bad.bin"
    shutil.copy(good, bad)

    def spoil(name, size_bytes):
        if name == "transfer":
            with open(bad, "r+b") as file:
                if damage == "cut":
                    file.truncate(size_bytes - 1)
                else:
                    file.seek(size_bytes // 2)
                    file.write(b"\xff\xee\xdd")

    def restore(path):
        session.restore(path, phase=spoil)

    before = held(session)
    with pytest.raises(SessionError, match="changed") as caught:
        restore(str(bad))
    assert caught.value.kind == "invalid"
    assert held(session) == before
    refused("invalid", "expected .* found", session.restore, bad)


# --- refused restores: of another run


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("qwen4exp-8layers", {}, "model"),
        ("qwen35", {}, "model"),
        ("qwen4exp", {"max_context": 252}, "configuration"),
        ("qwen4exp", {"max_context": 512}, "configuration"),
        *(("qwen4exp", {"kv": kv}, "configuration") for kv in ("int8", "q4_0", "k8v4")),
        *(("qwen4exp", {"spec": spec}, "configuration") for spec in (1, 3, 8)),
        ("qwen4exp", {"activations": "float"}, "configuration"),
    ],
)
def test_a_file_of_another_run_is_refused(name, options, word, live, refused, tmp_path):
    session, _, good = live
    other = new_session(name, **options)
    talk(other)
    other.save(str(good.parent / "other.bin"))
    refused("invalid", word, session.restore, good.parent / "other.bin")
    with pytest.raises(SessionError, match=word):
        other.restore(str(good))


def test_a_file_of_another_engine_version_is_refused(live, monkeypatch):
    _, _, good = live
    monkeypatch.setattr(engine_module, "VERSION", "0.0.9")
    other = Session(new_engine("qwen4exp"))
    talk(other)
    before = held(other)
    with pytest.raises(SessionError, match="configuration"):
        other.restore(str(good))
    assert held(other) == before


def test_every_setting_has_a_fingerprint_of_its_own():
    engines = [shared_engine("qwen4exp", kv=kv) for kv in FORMATS]
    engines += [shared_engine("qwen4exp", spec=spec) for spec in (1, 2)]
    engines += [shared_engine("qwen4exp", max_context=context) for context in (252, 255)]
    identities = [engine.identity() for engine in engines]
    assert len({identity.config for identity in identities}) == len(engines)
    assert len({identity.model for identity in identities}) == 1


def test_session_files_are_off_without_a_prompt_cache(live):
    _, _, good = live
    off = new_session(prompt_cache=0)
    talk(off)
    for operation, name in ((off.save, "new.bin"), (off.restore, "good.bin")):
        before = held(off)
        with pytest.raises(SessionError, match="--prompt-cache 0 turns session files off") as caught:
            operation(str(good.parent / name))
        assert caught.value.kind == "invalid"
        assert held(off) == before
    assert sorted(tree(good.parent)) == ["good.bin"]


# --- a restore that fails in the middle


@pytest.fixture(params=["the first cells", "the last cells", "the running state"])
def breaking(request, monkeypatch):
    """Makes a pool or a state array refuse bytes in the middle of a transfer."""
    calls = iter(range(1, 10**6))
    place = {"the first cells": 1, "the last cells": 4, "the running state": 3}[request.param]
    target = sessionstate.StateSink if request.param == "the running state" else kvcache.PoolWindow
    write = target.write

    def broken(self, part, offset, data):
        if next(calls) == place:
            raise RuntimeError("the pool is broken")
        write(self, part, offset, data)

    monkeypatch.setattr(target, "write", broken)


def test_a_failure_after_the_first_byte_is_fatal(live, breaking):
    session, _, good = live
    with pytest.raises(FatalError, match=r"after the conversation was overwritten: .*the pool is broken"):
        session.restore(str(good))


def test_a_fatal_restore_ends_the_loop_with_exit_code_1(live, breaking):
    session, prompt, good = live
    stdin = io.BytesIO(f"RESTORE {good}\nGEN 4 {','.join(map(str, prompt))}\n".encode())
    stdout = io.BytesIO()
    code = Loop(session, stdin, Answers(stdout), lambda line: None).run()
    lines = stdout.getvalue().decode().splitlines()
    assert code == 1
    assert [line.split()[0] for line in lines] == ["SESSION", "SWAIT", "SWAIT", "SESSION", "FATAL"]
    assert "the pool is broken" in lines[-1]


def test_identity_errors_are_of_the_kind_io(live, tmp_path):
    shutil.copy(MODELS / "qwen4exp.gguf", tmp_path / "gone.gguf")
    engine = loaded_from(str(tmp_path / "gone.gguf"))
    session = Session(engine)
    talk(session)
    (tmp_path / "gone.gguf").unlink()
    for operation in (session.save, session.restore):
        with pytest.raises(SessionError, match=r"gone\.gguf") as caught:
            operation(str(tmp_path / "a.bin"))
        assert caught.value.kind == "io"
