"""Control vectors: what is read from a file, and that sessions with and without one are never mixed."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

import controlvector
from controlvector import ControlVectorError, split_scale
from engine import Session
from given_engine import ask, ids, joined, new_engine, new_session, trunk
from modelconfig import ModelError
from sessionfile import inspect_session
from sessionlayout import SessionError

N_LAYERS, N_EMBD = 4, 32  # of qwen4exp


def directions(layers=range(N_LAYERS), size=N_EMBD, seed=0) -> dict:
    rng = np.random.default_rng(seed)
    return {f"direction.{layer}": rng.normal(size=size).astype(np.float32) for layer in layers}


def write(path, tensors, kind=GGMLQuantizationType.F32) -> str:
    writer = GGUFWriter(path, "controlvector")
    for name, data in tensors.items():
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# --- the file


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:0.5", "a.gguf", 0.5),
        ("a.gguf:-2", "a.gguf", -2.0),
        ("a:b.gguf", "a:b.gguf", 1.0),
        ("a:b.gguf:3", "a:b.gguf", 3.0),
        ("a.gguf:", "a.gguf:", 1.0),
        (":2", ":2", 1.0),
    ],
)
def test_a_scale_stands_behind_the_last_colon(text, path, scale):
    assert split_scale(text) == (path, scale)


def test_rows_are_scaled_and_layers_without_one_are_zero(tmp_path):
    tensors = directions(layers=(1, 3)) | {"other.1": np.ones(7, np.float32), "direction.x": np.ones(7, np.float32)}
    table, digest = controlvector.load(f"{write(tmp_path / 'v.gguf', tensors)}:0.5", N_LAYERS, N_EMBD)
    assert table.dtype == np.float32
    assert table.shape == (N_LAYERS, N_EMBD)
    np.testing.assert_array_equal(table[[0, 2]], 0)
    np.testing.assert_array_equal(table[1], tensors["direction.1"] * np.float32(0.5))
    np.testing.assert_array_equal(table[3], tensors["direction.3"] * np.float32(0.5))
    assert digest != 0


def test_a_quantised_file_is_read(tmp_path):
    tensors = directions()
    exact, _ = controlvector.load(write(tmp_path / "a.gguf", tensors), N_LAYERS, N_EMBD)
    half, _ = controlvector.load(write(tmp_path / "b.gguf", tensors, GGMLQuantizationType.F16), N_LAYERS, N_EMBD)
    eight, _ = controlvector.load(write(tmp_path / "c.gguf", tensors, GGMLQuantizationType.Q8_0), N_LAYERS, N_EMBD)
    assert 0 < np.abs(half - exact).max() < 2e-3
    assert 0 < np.abs(eight - exact).max() < 2e-2


def test_the_digest_is_of_what_is_added(tmp_path):
    path = write(tmp_path / "v.gguf", directions())
    moved = write(tmp_path / "moved.gguf", directions())
    other = write(tmp_path / "other.gguf", directions(seed=1))
    digest = {text: controlvector.load(text, N_LAYERS, N_EMBD)[1] for text in (path, moved, f"{path}:1.5", other)}
    assert digest[path] == digest[moved]
    assert len(set(digest.values())) == 3


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path):
    (tmp_path / "text.gguf").write_text("no control vector\n" * 20)
    cases = {
        str(tmp_path / "missing.gguf"): "missing.gguf",
        str(tmp_path): "",
        str(tmp_path / "text.gguf"): "text.gguf",
        write(tmp_path / "a.gguf", directions(size=64)): r"direction\.0 \[64\] fits no model of 4 layers x 32",
        write(tmp_path / "b.gguf", directions(layers=[4])): r"direction\.4 \[32\] fits no model of 4 layers x 32",
        write(tmp_path / "c.gguf", {"weight": np.ones(8, np.float32)}): "no control vector",
        f"{write(tmp_path / 'd.gguf', directions())}:nan": "a scale of nan cannot be used",
        f"{tmp_path / 'd.gguf'}:1e999": "a scale of inf cannot be used",
        f"{tmp_path / 'd.gguf'}:1e39": "beyond the range",
        write(tmp_path / "e.gguf", {"direction.1": np.full(32, np.nan, np.float32)}): "beyond the range",
    }
    for text, reason in cases.items():
        with pytest.raises(ControlVectorError, match=reason or None) as caught:
            controlvector.load(text, N_LAYERS, N_EMBD)
        assert "\n" not in str(caught.value)
        with pytest.raises(ModelError, match="--control-vector: "):
            new_engine("qwen4exp", control_vector=text)


# --- in a session


@pytest.fixture
def steered(tmp_path):
    """The path of a strong control vector for qwen4exp."""
    return write(tmp_path / "v.gguf", directions())


def test_a_vector_steers_and_one_of_nothing_does_not(tmp_path, steered):
    nothing = write(tmp_path / "zero.gguf", {"direction.2": np.zeros(N_EMBD, np.float32)})
    plain = ask(new_session(), ids(30), 20).tokens
    assert ask(new_session(control_vector=nothing), ids(30), 20).tokens == plain
    assert ask(new_session(control_vector=f"{steered}:0"), ids(30), 20).tokens == plain
    assert ask(new_session(control_vector=steered), ids(30), 20).tokens != plain


def test_a_steered_conversation_survives_a_restart(tmp_path, steered):
    path = str(tmp_path / "a.bin")
    stayed = new_session(control_vector=steered)
    reply = ask(stayed, ids(30), 8)
    stayed.save(path)
    assert inspect_session(path).image.cvec is True
    restored = Session(new_engine("qwen4exp", control_vector=steered))
    restored.restore(path)
    prompt = joined(ids(30), reply.tokens, ids(9, 1))
    answers = [ask(session, prompt, 12) for session in (stayed, restored)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].reused == 37
    assert trunk(stayed) == trunk(restored)


def test_a_file_of_another_control_vector_is_refused(tmp_path, steered):
    path = str(tmp_path / "a.bin")
    session = new_session(control_vector=steered)
    ask(session, ids(30), 8)
    session.save(path)
    for options in ({}, {"control_vector": f"{steered}:0.99"}, {"control_vector": f"{steered}:0"}):
        with pytest.raises(SessionError, match="configuration") as caught:
            new_session(**options).restore(path)
        assert caught.value.kind == "invalid"
    session.restore(path)


@pytest.mark.parametrize("parking", [100, 0])
def test_a_request_may_leave_the_vector_out(tmp_path, steered, parking):
    """Its tokens are those of an engine without one, and it shares nothing with what was computed with it."""
    session, plain = new_session(control_vector=steered, conversation_cache_mib=parking), new_session()
    with_vector = ask(session, ids(30), 8)
    without = ask(session, ids(30), 8, steered=False)
    assert (without.reused, without.tokens) == (0, ask(plain, ids(30), 8).tokens)
    path = str(tmp_path / "a.bin")
    session.save(path)
    assert inspect_session(path).image.cvec is False
    following = joined(ids(30), without.tokens, ids(5, 1))
    restored = Session(session.engine)
    restored.restore(path)
    for one in (session, restored):
        answer = ask(one, following, 8, steered=False)
        assert (answer.reused, answer.tokens) == (37, ask(plain, following, 8).tokens)
    again = ask(session, joined(ids(30), with_vector.tokens), 8)
    assert again.reused == (37 if parking else 0)
    assert again.tokens == ask(Session(session.engine), joined(ids(30), with_vector.tokens), 8).tokens


def test_a_file_computed_with_a_vector_needs_one(tmp_path, steered):
    session = new_session(control_vector=steered)
    ask(session, ids(30), 4)
    session.save(str(tmp_path / "a.bin"))
    restored = Session(session.engine)
    restored.restore(str(tmp_path / "a.bin"))
    assert restored.cache.steered
    assert ask(restored, joined(ids(30), ids(4, 3)), 4, steered=False).reused == 0
