"""Fields of bodies over HTTP: limits of 0, sampling and its defaults, what is refused, numbers no float can hold."""

import json
import math

import pytest

import httpchat
import httpsampling
from given_front import TEMPLATE, RunningFront, events, write_tokenizer_model
from httpfields import ApiError, json_bytes, parse_object
from tokenizer import Tokenizer
from verbs import parse_gen

N_CTX = 4096
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    with RunningFront(folder, write_tokenizer_model(folder / "tiny.gguf")) as front:
        yield front


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_tokenizer_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def keys_of(tokenizer, **body) -> dict[str, str]:
    words = httpchat.read_completion({"prompt": "hi", **body}, tokenizer, N_CTX).line(tokenizer.end_ids).split(" ")
    return dict(word.split("=") for word in words[2:-1])


def refusal(tokenizer, **body) -> str:
    with pytest.raises(ApiError) as caught:
        httpchat.read_completion({"prompt": "hi", **body}, tokenizer, N_CTX)
    assert caught.value.status == 400
    return str(caught.value)


# --- A limit of 0 ---


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_zero_reads_the_prompt_and_answers_nothing(front, path, name, stream):
    answer = front.post(path, {**ROUTES[path], name: 0, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert front.verbs()[-1].startswith("GEN 0 ")
    said = events(answer.text) if stream else [answer.json()]
    last, text = said[-1], ""
    for event in said:
        choice = event.get("choices", [event])[0]
        text += (choice.get("delta") or choice.get("message") or choice).get("content") or choice.get("text") or ""
    assert text == ""
    assert last["timings"]["predicted_n"] == 0
    if path == "/completion":
        assert (last["stop_type"], last["tokens"]) == ("limit", [])
    else:
        assert last["choices"][0]["finish_reason"] == "length"
    # The prompt is kept: it is what is held now.
    n_prompt = last["timings"]["cache_n"] + last["timings"]["prompt_n"]
    assert front.get("/slots").json()[0]["n_prompt_tokens"] >= n_prompt - 1


def test_a_limit_of_zero_needs_no_room_for_a_token(tokenizer):
    for n_spare, limit, fits in ((8, 0, True), (8, 1, False), (8, None, False), (9, None, True), (7, 0, False)):
        body = {"prompt": [65] * (N_CTX - n_spare), "max_tokens": limit}
        if fits:
            assert httpchat.read_completion(body, tokenizer, N_CTX).max_new == (0 if limit == 0 else 1)
        else:
            assert "exceeds the available context size" in refusal(tokenizer, **body)


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_look_for(front):
    error = front.chat("x" * 5000).json()["error"]
    assert "exceeds the available context size" in error["message"]
    assert "does not fit the context of 4096" in error["message"]
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 4096)
    uncounted = httpchat.exceeds_context(9000, 4096, at_least=True).body["error"]
    assert "at least 9000 tokens exceeds the available context size" in uncounted["message"]
    assert (uncounted["n_ctx"], uncounted["n_prompt_tokens"]) == (4096, 9000)


# --- Sampling ---


def test_what_is_zero_or_empty_is_not_absent(tokenizer):
    zeros = {"temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0}
    keys = keys_of(tokenizer, **zeros, repeat_last_n=0)
    assert {name: float(keys[name]) for name in zeros} == dict.fromkeys(zeros, 0.0)
    assert keys["repeat_last_n"] == "0"
    assert "seed" not in keys
    assert keys_of(tokenizer, seed=0)["seed"] == "0"
    assert float(keys_of(tokenizer, temperature=-0.0)["temperature"]) == 0
    request = httpchat.read_completion({"prompt": "hi", "stop": "", "stream": False}, tokenizer, N_CTX)
    assert (request.stops, request.stream) == ((), False)
    assert httpchat.read_completion({"prompt": "hi", "stop": ["", "x"]}, tokenizer, N_CTX).stops == ("x",)


def test_without_wishes_llama_servers_defaults_hold(tokenizer):
    keys = keys_of(tokenizer, seed=3)
    assert {name: float(keys[name]) for name in DEFAULTS} == DEFAULTS
    assert (keys["seed"], keys["source"]) == ("3", "1")
    assert keys_of(tokenizer, temperature=None, top_k=None, top_p=None, min_p=None, seed=3) == keys


def with_sampling(folder, **settings) -> str:
    def add(writer):
        for name, value in settings.items():
            kind = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
            kind[type(value)](f"general.sampling.{name}", value)

    return write_tokenizer_model(folder / "tiny.gguf", add=add)


def test_the_model_files_own_defaults_come_first(tmp_path):
    named = {"temp": 0.6, "top_k": 20, "top_p": 0.9, "penalty_repeat": 1.05, "penalty_last_n": -1, "mirostat": 0}
    with RunningFront(tmp_path, with_sampling(tmp_path, **named)) as front:
        params = front.get("/props").json()["default_generation_settings"]["params"]
        wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.05}
        assert params == {**wanted, "repeat_last_n": -1, "n_predict": -1}
        front.chat()
        said = dict(word.split("=") for word in front.verbs()[-1].split(" ")[2:] if "=" in word)
        assert {name: float(said[name]) for name in wanted} == wanted
        assert said["repeat_last_n"] == str(N_CTX)
        front.chat(temperature=0, top_k=7)
        assert {"temperature=0.0", "top_k=7", "top_p=0.9"} < set(front.verbs()[-1].split(" "))
        assert not [line for line in front.terminal.lines if "sampling" in line]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", math.nan),
        ("temp", math.inf),
        ("temp", -1.0),
        ("temp", "hot"),
        ("temp", True),
        ("top_k", 0.5),
        ("top_k", "many"),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("penalty_repeat", 0.0),
        ("penalty_last_n", "all"),
        ("mirostat", 2),
        ("xtc_probability", 0.5),
        ("sequence", "kt"),
    ],
)
def test_a_hostile_default_is_refused_with_a_line(tmp_path, name, value):
    tokenizer = Tokenizer.load(with_sampling(tmp_path, **{name: value}))
    defaults, lines = httpsampling.model_defaults(tokenizer.sampling)
    assert defaults == DEFAULTS
    assert len(lines) == 1
    assert f"general.sampling.{name} is not used" in lines[0]
    keys = keys_of(tokenizer)
    assert {name: float(keys[name]) for name in DEFAULTS} == DEFAULTS


def test_a_hostile_default_stands_in_the_log_once(tmp_path):
    with RunningFront(tmp_path, with_sampling(tmp_path, temp=math.nan)) as front:
        front.chat()
        front.chat()
        assert len([line for line in front.terminal.lines if "general.sampling.temp is not used" in line]) == 1
        assert front.get("/props").json()["default_generation_settings"]["params"]["temperature"] == 0.8


def test_samplers_that_are_left_out_are_off(tokenizer):
    keys = keys_of(tokenizer, samplers=["top_k", "dry", "temperature"], repeat_penalty=1.2)
    wanted = {"repeat_penalty": 1.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0, "temperature": 0.8}
    assert {name: float(keys[name]) for name in wanted} == wanted
    assert float(keys_of(tokenizer, samplers=[])["temperature"]) == 1.0
    assert keys_of(tokenizer, samplers=["top_k"], temperature=0) == keys_of(tokenizer, temperature=0)
    assert "samplers: " in refusal(tokenizer, samplers=["temperature", "top_k"])
    assert "samplers: " in refusal(tokenizer, samplers="kt")
    assert keys_of(tokenizer, samplers=["temp", "top_k"], top_k=0)["top_k"] == "0"


# --- Fields that change the answer ---

CHANGING = {
    "logprobs": [True, 5],
    "top_logprobs": [2],
    "n_probs": [1],
    "grammar": ["root ::= x"],
    "json_schema": [{"type": "object"}],
    "guided_json": [{"type": "object"}, "{}"],
    "guided_regex": ["a+"],
    "guided_choice": [["a", "b"]],
    "guided_grammar": ["x"],
    "structured_outputs": [{"json": {}}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, {"type": 5}],
    "response_fields": [["content"]],
    "logit_bias": [{"5": 1}, [[5, 1.0]]],
    "ignore_eos": [True, 1, "false"],
    "min_tokens": [1],
    "mirostat": [1, 2, "0", [1]],
    "dry_multiplier": [0.8],
    "xtc_probability": [0.5],
    "typical_p": [0.9, 0],
    "typ_p": [0.9],
    "tfs_z": [0.9],
    "top_n_sigma": [1.0],
    "adaptive_target": [0, 0.5],
    "dynatemp_range": [0.5],
    "lora": [[{"id": 0, "scale": 1.0}]],
    "n": [0, 2, True, 1.5, "1", -1],
    "best_of": [2, False],
    "suffix": ["x"],
    "echo": [True],
    "modalities": [["text", "audio"], ["audio"]],
    "audio": [{"voice": "alloy"}],
    "t_max_predict_ms": [100],
    "id_slot": [1, "0"],
    "reasoning_format": ["deepseek-legacy", "", 5],
    "image_data": [[{"id": 1}]],
    "guidance_scale": [1.5],
    "min_keep": [2],
    "web_search_options": [{"search_context_size": "low"}],
    "thinking_budget_tokens": [0, 100],
    "chat_template": ["{{ messages[0].content }}"],
    "documents": [[{"text": "x"}]],
    "n_cmpl": [2, 0],
    "n_indent": [4],
    "parse_tool_calls": [False],
    "include_reasoning": [False],
    "separate_reasoning": [False],
    "reasoning_in_content": [True],
    "thinking_forced_open": [True],
    "min_new_tokens": [5],
    "stop_regex": ["a+"],
    "structural_tag": ["{}"],
    "no_stop_trim": [True],
    "grammar_string": ["root ::= x"],
    "custom_logit_processor": ["x"],
    "return_token_ids": [True],
    "skip_special_tokens": ["yes"],
    "cache_prompt": ["no"],
    "parallel_tool_calls": ["no"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHANGING.items() for value in values])
def test_a_field_that_changes_the_answer_is_refused_by_its_name(tokenizer, name, value):
    body = {**ROUTES["/v1/chat/completions"], name: value}
    with pytest.raises(ApiError) as caught:
        httpchat.read_chat(body, tokenizer, N_CTX)
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == name


# What SillyTavern, Open WebUI, text-generation-webui's clients and SDKs send always.
NEUTRAL = {
    "mirostat": 0, "mirostat_mode": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0.0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 0, "dry_sequence_breakers": ["\n", ":"],
    "xtc_probability": 0, "xtc_threshold": 0.1, "typical_p": 1, "typical": 1.0, "typ_p": 1, "tfs": 1, "tfs_z": 1.0,
    "top_a": 0, "top_n_sigma": -1, "nsigma": 0, "min_keep": 0, "dynatemp_range": 0, "dynatemp_exponent": 1.0,
    "dynamic_temperature": False, "smoothing_factor": 0, "smoothing_curve": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "penalty_alpha": 0, "do_sample": True, "num_beams": 1, "length_penalty": 1, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1, "guidance_scale": 1, "negative_prompt": "", "grammar_string": "",
    "ban_eos_token": False, "ignore_eos": False, "min_tokens": 0, "min_length": 0, "custom_token_bans": "",
    "banned_strings": [], "add_bos_token": True, "skip_special_tokens": True, "early_stopping": False,
    "truncation_length": 4096, "temperature_last": True, "logit_bias": {}, "logprobs": False, "top_logprobs": None,
    "n_probs": 0, "grammar": "", "json_schema": None, "response_format": {"type": "text"}, "guided_json": None,
    "structured_outputs": None, "lora": [], "n": 1, "best_of": 1.0, "modalities": ["text"], "audio": None,
    "prediction": None, "store": False, "parallel_tool_calls": True, "n_keep": -1, "n_discard": 0,
    "t_max_predict_ms": 0, "id_slot": -1, "cache_prompt": True, "image_data": [], "metadata": {}, "user": "me",
    "service_tier": "auto", "stop_token_ids": [], "tools": [], "functions": [], "tool_choice": "auto",
    "function_call": None, "suffix": None, "echo": False, "adaptive_target": -0.01, "use_beam_search": False,
    "include_stop_str_in_output": False, "truncate_prompt_tokens": None, "thinking_budget_tokens": -1,
    "reasoning_format": "auto", "chat_template": None, "documents": [], "n_cmpl": 1, "n_indent": 0,
    "parse_tool_calls": True, "include_reasoning": True, "separate_reasoning": True, "reasoning_in_content": False,
    "thinking_forced_open": False, "min_new_tokens": 0, "stop_regex": "", "no_stop_trim": False,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "unheard_of": {"a": [1]},
}  # fmt: skip


def test_values_that_change_nothing_are_accepted(tokenizer):
    plain, body = keys_of(tokenizer, seed=1), ROUTES["/v1/chat/completions"]
    assert keys_of(tokenizer, seed=1, **NEUTRAL) == plain
    assert keys_of(tokenizer, seed=1, **dict.fromkeys(NEUTRAL)) == plain
    with_all, without = ({**body, **fields} for fields in (NEUTRAL, {}))
    assert httpchat.read_chat(with_all, tokenizer, N_CTX).ids == httpchat.read_chat(without, tokenizer, N_CTX).ids


def test_what_can_be_followed_is(tokenizer):
    assert keys_of(tokenizer, cache_prompt=False)["ckpt"] == "0"
    assert "ckpt" not in keys_of(tokenizer)
    assert keys_of(tokenizer, stop_token_ids=[65, 3])["stop"] == "3,65,257,258"


def test_functions_are_answered_in_their_own_words(front):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    old = {"functions": [TOOL["function"]]}
    front.script("GEN", "@accept", f"@text {call}".replace("\n", ""), "@done")
    (choice,) = front.chat(**old).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]
    front.script("GEN", "@accept", f"@text {call * 2}".replace("\n", ""), "@done")
    said = [event["choices"][0] for event in events(front.stream(**old))]
    assert [one["delta"]["function_call"]["name"] for one in said if "function_call" in one["delta"]] == ["add"]
    assert said[-1]["finish_reason"] == "function_call"


@pytest.mark.parametrize("stream", [False, True])
def test_described_tools_are_said_in_a_header_and_once_in_the_log(tmp_path, stream):
    plain = TEMPLATE.replace("tools", "others")
    with RunningFront(tmp_path, write_tokenizer_model(tmp_path / "plain.gguf", plain)) as front:
        for _ in range(2):
            answer = front.chat(tools=[TOOL], stream=stream)
            assert answer.status_code == 200
            assert "the system text describes them" in answer.headers["x-strata-notice"]
        assert "x-strata-notice" not in front.chat(stream=stream).headers
        assert len([line for line in front.terminal.lines if "describes them" in line]) == 1


# --- JSON that common readers of lines leave whole ---


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_a_line_for_some_reader_is_escaped(front, path, stream):
    text = "".join(map(chr, (0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029)))
    front.script("GEN", "@accept", f"@ids {','.join(map(str, f'a{text}b'.encode()))}", "@done")
    raw = front.post(path, {**ROUTES[path], "stream": stream}).text
    assert raw.splitlines() == raw.split("\n")[: len(raw.splitlines())]
    said = events(raw) if stream else [json.loads(raw)]
    shown = ""
    for event in said:
        choice = event.get("choices", [event])[0]
        shown += (choice.get("delta") or choice.get("message") or choice).get("content") or choice.get("text") or ""
    assert shown == f"a{text}b"


def test_texts_outside_answers_are_escaped_too(front):
    text = "a\x85\u2028\u2029b"
    for path, body, name in (
        ("/detokenize", {"tokens": list(text.encode())}, "content"),
        ("/apply-template", {"messages": [{"role": "user", "content": text}]}, "prompt"),
    ):
        answer = front.post(path, body)
        assert len(answer.text.splitlines()) == 1
        assert text in answer.json()[name]


# --- Hostile values ---

HUGE = 10**400
HOSTILE = [
    HUGE, -HUGE, 10**4000, "1e400", "-1e400", "1e-400", "-0.0", "-0", 2**63, 2**64, -(2**63), 1e300, -1e300, 5e-324,
    "1", "", "NaN", "inf", True, False, [], {}, [[]], [HUGE], {"a": HUGE}, [None], [True], ["x"], "\ud800", 0.5, -1, 0,
    1,
]  # fmt: skip
FIELDS = sorted(
    {
        *httpsampling.NEUTRAL,
        *httpsampling.SETTINGS,
        *CHANGING,
        *NEUTRAL,
        "repetition_penalty",
        "seed",
        "stop",
        "stream",
    }
    | {
        "max_tokens",
        "max_completion_tokens",
        "n_predict",
        "stream_options",
        "return_progress",
        "messages",
        "prompt",
        "tools",
    }
    | {
        "tool_choice",
        "functions",
        "chat_template_kwargs",
        "reasoning_effort",
        "enable_thinking",
        "continue_final_message",
    }
    | {"add_generation_prompt", "model", "samplers"}
)
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
COUNTS = ("top_k", "repeat_last_n", "seed", "max_tokens", "max_completion_tokens", "n_predict", "n", "best_of")


def spelled(name: str, value: object) -> bytes:
    """A body with this value, and with the numbers of JSON that Python does not write."""
    raw = json.dumps({**ROUTES["/completion"], **ROUTES["/v1/chat/completions"], "max_tokens": 1, name: value})
    for text in ("1e400", "-1e400", "1e-400", "-0.0", "-0"):
        raw = raw.replace(f'"{name}": "{text}"', f'"{name}": {text}')
    return raw.encode()


def post(front, path: str, name: str, value: object):
    return front.client.post(path, content=spelled(name, value), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("name", [*NUMBERS, *COUNTS])
def test_a_number_that_is_none_is_refused_by_its_name(front, name):
    for value in ("1e400", "-1e400", HUGE, -HUGE, 1e300, True, False, "1 ", "NaN", [], {}):
        for path in ROUTES:
            answer = post(front, path, name, value)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), (path, value)


def test_no_value_of_any_field_is_a_fault_of_the_server(tokenizer):
    for name in FIELDS:
        for value in HOSTILE:
            body = parse_object(spelled(name, value))
            for read in (httpchat.read_chat, httpchat.read_completion):
                status = status_of(read, body, tokenizer)
                assert status in (200, 400), (name, value)


def status_of(read, body: dict, tokenizer) -> int:
    """That of a body which is read and, where nothing is wrong with it, made a GEN line."""
    try:
        request = read(body, tokenizer, N_CTX)
    except ApiError as error:
        return error.status if json_bytes(error.body) else 0
    httpchat.AnswerReader(request, tokenizer)
    parse_gen(request.line(tokenizer.end_ids).removeprefix("GEN ").encode())
    return 200


@pytest.mark.parametrize("value", [HUGE, "1e400", "\ud800", [{}]], ids=["huge", "infinite", "surrogate", "nested"])
def test_no_value_of_any_field_is_a_fault_on_the_wire(front, value):
    statuses = {post(front, path, name, value).status_code for name in FIELDS for path in ROUTES}
    assert statuses <= {200, 400}


def test_ids_and_options_inside_lists_and_objects_are_checked(front):
    for name, value in (
        ("prompt", [HUGE]),
        ("prompt", [1e400]),
        ("prompt", [2.0]),
        ("stop_token_ids", [HUGE]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stream_options", {"include_usage": 1}),
        ("stop", [5]),
        ("stop", 5),
    ):
        raw = json.dumps({"prompt": "hi", "max_tokens": 1, name: value}).replace("Infinity", "1e400").encode()
        answer = front.client.post("/completion", content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, (name, value, answer.text)
