"""An engine that is loaded or refused, and what it tells of itself."""

import pytest

import engine as engine_module
from engine import Engine, Session
from given_engine import MODELS, new_engine
from modelconfig import ModelError
from options import EngineOptions


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("llama", {"kv": "int8"}, "head width of 16 can hold fp16"),
        ("qwen4exp-8layers", {"kv": "k8v4"}, "head width of 32 can hold fp16, q4_0"),
        ("qwen4exp", {"backend": "cuda"}, "no CUDA backend"),
        ("qwen4exp", {"kv_resident": 20480}, "--kv-resident"),
        ("qwen4exp", {"threads": 10**6}, "--threads 1000000"),
        ("no such model", {}, "no such model.gguf"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name, options, text):
    with pytest.raises(ModelError, match=text) as caught:
        Engine.load(EngineOptions(model=str(MODELS / f"{name}.gguf"), **options))
    assert "\n" not in str(caught.value)


def test_threads_follow_what_the_process_may_use(monkeypatch):
    """The default, and a number that is more than can run at once, which is told."""
    monkeypatch.setattr(engine_module.resources, "usable_cores", lambda: 1)
    monkeypatch.setattr(engine_module.resources, "allowed_processors", lambda: 1)
    monkeypatch.setattr(engine_module.resources, "all_processors", lambda: 8)
    log = []
    engine = Engine.load(EngineOptions(model=str(MODELS / "llama.gguf"), backend="cpu"), log.append)
    assert (engine.ops.n_threads, log) == (1, [])
    engine = Engine.load(EngineOptions(model=str(MODELS / "llama.gguf"), backend="cpu", threads=3), log.append)
    assert engine.ops.n_threads == 1
    assert log == ["--threads 3 is taken as 1: this process's affinity lets no more run at once"]
    with pytest.raises(ModelError, match="--threads 9: this machine runs at most 8"):
        Engine.load(EngineOptions(model=str(MODELS / "llama.gguf"), backend="cpu", threads=9))


def test_the_window_of_a_model_without_a_draft_layer_is_one():
    lines = []
    options = EngineOptions(model=str(MODELS / "qwen35.gguf"), spec=4, threads=1, backend="cpu")
    engine = Engine.load(options, lines.append)
    assert engine.spec == 1
    assert lines == ["--spec 4 has no effect: this model has no draft layer"]


@pytest.mark.parametrize(("name", "why"), [("qwen3moe", "the CPU computes"), ("qwen35", "this model has no experts")])
def test_options_for_experts_on_a_device_say_that_they_have_no_effect(name, why, tmp_path):
    lines, path = [], tmp_path / "profile"
    options = EngineOptions(
        model=str(MODELS / f"{name}.gguf"), threads=1, backend="cpu", expert_cache_mib=9, expert_profile_save=str(path)
    )
    Session(Engine.load(options, lines.append)).close()
    assert [line.split(" has no effect: ")[0] for line in lines] == ["--expert-cache-mib", "--expert-profile-save"]
    assert all(why in line for line in lines)
    assert not path.exists()


def test_info_has_what_the_start_prints_in_its_order():
    info = new_engine("qwen4exp", kv="int8", spec=3).info()
    first = ["context", "kv", "kv_resident", "backend", "model", "n_vocab", "spec", "conversation_cache_mib"]
    assert list(info)[:8] == first
    assert list(info)[-1] == "engine"
    expected = ("256", "int8", "cpu", "96", "3")
    assert tuple(info[key] for key in ("context", "kv", "backend", "n_vocab", "spec")) == expected
