"""The records of options: one field is a flag, a key of the config file, a default; a record refuses values itself."""

import argparse
import json

import pytest

from options import ALL_OPTIONS, EngineOptions, HttpOptions, OptionRefused, add_arguments, options_of, read_options

# A value of each option that is not its default.
OTHERS = {
    "slot_save_path": "/",
    "store": "/",
    "kv": "k8v4",
    "backend": "cpu",
    "activations": "float",
    "kv_resident": 20480,
}


def read(*args: str, config: str | None = None) -> tuple[EngineOptions, HttpOptions]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(args)
    given.config = config
    return read_options(given)


def other(option) -> str | int:
    """A value that an option may have and does not have of itself."""
    if option.name in OTHERS:
        return OTHERS[option.name]
    return "some" if option.config_type is str else 7


@pytest.mark.parametrize("record", [EngineOptions, HttpOptions])
def test_a_record_comes_back_from_its_own_command_line(record):
    values = record(**{option.name: other(option) for option in options_of(record)})
    flags = [] if record is HttpOptions else ["--http=0"]
    assert values in read(*flags, *values.flags())
    assert record() == record(**{option.name: option.default for option in options_of(record)})


@pytest.mark.parametrize("option", ALL_OPTIONS, ids=lambda option: option.name)
def test_flag_and_config_file_give_the_same(option, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"http": "0"} | {option.name: other(option)}))
    assert read("--http=0", f"{option.flag}={other(option)}") == read(config=str(config)) != read("--http=0")


@pytest.mark.parametrize(
    ("record", "values", "message"),
    [
        (EngineOptions, {"activations": "float32"}, "--activations: 'float32' is none of int8, float"),
        (EngineOptions, {"kv": "fp8"}, "--kv: 'fp8' is none of fp16, int8, q4_0, k8v4"),
        (EngineOptions, {"spec": 0}, "--spec: '0' is not a whole number from 1"),
        (EngineOptions, {"spec": 9}, "--spec: '9' is not a whole number from 1 to 8"),
        (EngineOptions, {"kv_resident": 20479}, "--kv-resident: at least 20480, or 0 for all, found 20479"),
        (EngineOptions, {"prompt_cache_every": 0}, "--prompt-cache-every: '0' is not a whole number from 1"),
        (EngineOptions, {"conversation_cache_slots": 0}, "--conversation-cache-slots: '0' is not a whole"),
        (EngineOptions, {"session_min_free_mib": 2**31}, "--session-min-free-mib: '2147483648' is not a whole number"),
        (EngineOptions, {"kv": None}, "--kv must be a string, found null"),
        (EngineOptions, {"threads": 0}, "--threads: '0' is not a whole number from 1"),
        (EngineOptions, {"threads": True}, "--threads must be a whole number, found true"),
        (EngineOptions, {"prompt_cache": -1}, "--prompt-cache: '-1' is not a whole number from 0"),
        (EngineOptions, {"model": b"a"}, "--model must be a string, found \"b'a'\""),
        (HttpOptions, {"api_key": ""}, "--api-key: it must not be empty"),
        (HttpOptions, {"engine_silence_s": None}, "--engine-silence-s must be a whole number, found null"),
    ],
)
def test_a_record_refuses_what_its_flags_would(record, values, message):
    with pytest.raises(OptionRefused) as refused:
        record(**values)
    assert str(refused.value).startswith(message)


def test_options_of_the_front_need_one():
    with pytest.raises(OptionRefused, match=r"^--host, --api-key without --http: there is"):
        read("--api-key=a", "--host=b")
