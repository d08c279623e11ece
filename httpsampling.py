"""How the next token is chosen, in the words of a body: settings, their defaults, and the fields that are refused.

Owns the names and ranges of sampling fields, the defaults that a model file or this server gives them, and the table of
fields that would change the answer and cannot be followed. Refuses to know prompts and answers. Invariant: what comes
out of here is a set of keys that the engine accepts, and no field of the table is skipped in silence.

Read next: ``httpchat.py``, which makes GEN lines of these keys.
"""

import secrets
from collections.abc import Callable

from httpfields import BadField, number, optional, shown, whole
from verbs import MAX_INT32, MAX_UINT64, REAL_KEYS, REFERENCE_KEYS

# Counts above this are no wish but a mistake; those up to it are cut down to what there is.
MAX_WISH = 2**63 - 1
MAX_STOPS = 64
# A request outside the ranges of the GEN line is refused here, where the field has the client's name.
SETTINGS = (*REAL_KEYS, "top_k", "repeat_last_n")
OTHER_NAMES = {"repetition_penalty": "repeat_penalty"}
# As llama-server has them, for a model whose file names none.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Settings by their names below `general.sampling.` in a model file.
MODEL_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
} | {name: REFERENCE_KEYS[name] for name in ("penalty_repeat", "penalty_last_n")}
# The steps of the choice in the order that this engine keeps, and the settings with which each does nothing.
STEPS = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}

# Fields that would change the answer and cannot be followed, by the values with which they change nothing: many clients
# send all of these always. Null is one of them everywhere.
OFF = (False, 0, "", [], {})
OFF_FIELDS = (
    # Another form of the answer.
    "logprobs top_logprobs prompt_logprobs n_probs echo suffix audio include_stop_str_in_output response_fields"
    " web_search_options n_indent no_stop_trim reasoning_in_content return_token_ids"
    # Answers that keep to a form.
    " grammar grammar_string json_schema guided_json guided_regex guided_choice guided_grammar structured_outputs"
    " structural_tag regex ebnf stop_regex"
    # Tokens that are wanted, or are not.
    " logit_bias ignore_eos ban_eos_token banned_tokens custom_token_bans banned_strings bad_words bad_words_ids"
    " allowed_token_ids logits_processors custom_logit_processor no_repeat_ngram_size"
    # Other ways to choose.
    " mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range dynamic_temperature top_a epsilon_cutoff"
    " eta_cutoff smoothing_factor penalty_alpha use_beam_search min_keep skew"
    # Other models, other inputs.
    " lora image_data images multimodal_data"
    # Another prompt.
    " chat_template documents thinking_forced_open"
)
# True is 1.
ONE_FIELDS = (
    "typical_p typical typ_p tfs_z tfs guidance_scale cfg_scale num_beams encoder_repetition_penalty do_sample"
    " parse_tool_calls include_reasoning separate_reasoning"
)
# Off at 0 and below, and below 0; a thinking budget of 0 is no thinking at all.
LIMIT_FIELDS = "min_tokens min_length min_new_tokens t_max_predict_ms truncate_prompt_tokens top_n_sigma nsigma"
SIGNED_FIELDS = "adaptive_target reasoning_budget thinking_budget thinking_budget_tokens thinking_token_budget"
NEUTRAL: dict[str, Callable[[object], bool]] = (
    dict.fromkeys(OFF_FIELDS.split(), lambda value: value in OFF)
    | dict.fromkeys(ONE_FIELDS.split(), lambda value: value == 1)
    | dict.fromkeys(LIMIT_FIELDS.split(), lambda value: isinstance(value, int | float) and value <= 0)
    | dict.fromkeys(SIGNED_FIELDS.split(), lambda value: isinstance(value, int | float) and value < 0)
    | {
        "id_slot": lambda value: value in (0, -1),
        "modalities": lambda value: value in ([], ["text"]),
        "reasoning_format": lambda value: value in ("auto", "deepseek", "none"),
    }
)


def refuse_unsupported(body: dict) -> None:
    """Refuse, by its name, each field that would change the answer and cannot be followed."""
    for name in NEUTRAL.keys() & body.keys():
        value = body[name]
        if value is not None and not NEUTRAL[name](value):
            raise BadField(name, f"{shown(value)} is not supported by this engine; leave it out")
    for name in ("n", "n_cmpl", "best_of"):
        if body.get(name) is not None and whole(name, body[name], 0, MAX_WISH) != 1:
            raise BadField(name, "only one answer a request is supported")
    wanted = optional(body, "response_format", dict, {}).get("type", "text")
    if wanted != "text":
        raise BadField("response_format", f"{shown(wanted)} is not supported by this engine, only 'text'")


def model_defaults(named: dict[str, object]) -> tuple[dict[str, float | int], list[str]]:
    """The settings of a request that names none, and a line for each that the model's file has and that is not used.

    ``named`` is what the file says below `general.sampling.`.
    """
    defaults, lines = dict(DEFAULTS), []
    for name, value in named.items():
        try:
            if name in MODEL_NAMES:
                # A float32 of the file has no more digits than these.
                exact = float(f"{value:.7g}") if type(value) is float else value
                defaults[MODEL_NAMES[name]] = _setting(MODEL_NAMES[name], exact)
            elif name == "sequence" or name in NEUTRAL:
                refuse_unsupported({name: value})
                if name == "sequence":
                    raise BadField(name, "the order of the steps is fixed")
        except BadField as error:
            lines.append(f"the model file's general.sampling.{name} is not used: {error}")
    return defaults, lines


def read_sampling(body: dict, defaults: dict[str, float | int], n_ctx: int) -> dict[str, float | int]:
    """The sampling keys of the GEN line; raises BadField."""
    keys = dict(defaults)
    for given, name in (*OTHER_NAMES.items(), *zip(SETTINGS, SETTINGS, strict=True)):
        if body.get(given) is not None:
            keys[name] = _setting(given, body[given])
    seed = -1 if body.get("seed") is None else whole("seed", body["seed"], -MAX_WISH, MAX_UINT64)
    if keys["temperature"]:
        _keep_to_samplers(body, keys)
        keys["seed"] = secrets.randbits(31) if seed == -1 else seed & MAX_UINT64
    if "repeat_last_n" in keys:
        last = keys["repeat_last_n"]
        keys["repeat_last_n"] = n_ctx if last < 0 else min(last, n_ctx)
    return keys


def _setting(name: str, value: object) -> float | int:
    if name == "top_k":
        return min(max(whole(name, value, -MAX_WISH, MAX_WISH), 0), MAX_INT32)
    if name == "repeat_last_n":
        return max(whole(name, value, -MAX_WISH, MAX_WISH), -1)
    return number(name, value, *REAL_KEYS[OTHER_NAMES.get(name, name)])


def _keep_to_samplers(body: dict, keys: dict[str, float | int]) -> None:
    """Switch off the steps that the field ``samplers`` leaves out; refuse it where it wants another order."""
    samplers = optional(body, "samplers", list, None)
    if samplers is None:
        return
    names = ["temperature" if name == "temp" else name for name in samplers]
    for step, off in STEPS.items():
        if step not in names:
            keys |= {name: value for name, value in off.items() if name in keys}
    active = [step for step, off in STEPS.items() if any(keys.get(name, value) != value for name, value in off.items())]
    if sorted(active, key=names.index) != active:
        raise BadField("samplers", f"this engine keeps to the order {', '.join(STEPS)}")


def read_stops(body: dict) -> tuple[str, ...]:
    """The stop strings; an empty one stops nothing."""
    stops = body.get("stop")
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops) or len(stops) > MAX_STOPS:
        raise BadField("stop", f"expected a text or a list of at most {MAX_STOPS} texts")
    return tuple(stop for stop in stops if stop)


def read_limit(body: dict) -> int | None:
    """The limit on the answer, which may be 0; None where the field is absent, null or negative: none."""
    names = [name for name in ("max_completion_tokens", "max_tokens", "n_predict") if body.get(name) is not None]
    limits = [whole(name, body[name], -MAX_WISH, MAX_WISH) for name in names]
    return limits[0] if limits and limits[0] >= 0 else None
