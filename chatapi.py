"""Request bodies to prompts and GEN lines, answers to the JSON of three dialects: OpenAI chat, OpenAI text, llama.cpp.

Owns the names of fields, their ranges and what is refused; refuses to know sockets, pipes and the queue. Invariant: a
body that comes through here makes a GEN line that the engine accepts, for any other the client is told what is wrong.

Read next: ``httpfront.py``, which calls this for each request; ``answertext.py``, which cuts answers into parts.
"""

import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from answertext import MARKS, THINK, AnswerParser, Part, ShownTokens, StopStrings, ToolCall
from childproc import Done, PromptProgress, Source
from tokenizer import Prompt, Tokenizer, TokenizerError

# Cells that the engine keeps free behind prompt and answer.
SPARE_CELLS = 8
# Prompts of up to so many contexts are counted exactly when they are refused.
FAR_TOO_LONG = 2
MAX_STOPS = 64
MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1
# The ranges of the GEN line; a request outside them is refused here, where the field has the client's name.
SAMPLING_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
# Fields that would change the answer and cannot be honoured: silence about them would be a wrong answer.
UNSUPPORTED = ("logprobs", "top_logprobs", "n_probs", "grammar", "json_schema", "logit_bias", "suffix", "echo", "audio")


class ApiError(Exception):
    """A request that is refused: status, text and type of the error body, and further fields of it."""

    def __init__(self, status: int, message: str, category: str = "", headers: dict[str, str] | None = None, **extra):
        super().__init__(message)
        self.status = status
        self.headers = headers
        category = category or ("invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"code": status, "message": message, "type": category, **extra}}


class BadField(ApiError):
    """A field of the body that cannot be used."""

    def __init__(self, name: str, text: str):
        super().__init__(400, f"{name}: {text}", param=name)


# --- Reading a body ---


def parse_object(raw: bytes, *, unique: bool = False) -> dict:
    """A JSON object; raises ApiError for anything else, however deep or strange."""

    def pairs_to_dict(pairs: list[tuple[str, object]]) -> dict:
        values = dict(pairs)
        if unique and len(values) < len(pairs):
            raise ValueError("a key is given twice")
        return values

    def refuse(word: str):
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs_to_dict, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


@dataclass
class GenerationRequest:
    """What a body asks for, checked; ``order`` makes it a GEN line."""

    ids: list[int]
    max_new: int
    sampling: dict[str, float | int]
    stops: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    with_progress: bool = False
    reasoning: bool = False
    thinking: bool = False
    tools: bool = False

    def order(self, end_ids: frozenset[int]) -> str:
        """The GEN line; the answer also stops at ``end_ids``."""
        keys = ["source=1", *[f"{name}={value}" for name, value in self.sampling.items()]]
        if end_ids:
            keys.append(f"stop={','.join(map(str, sorted(end_ids)))}")
        return " ".join([f"GEN {self.max_new}", *keys, ",".join(map(str, self.ids))])

    def parser(self) -> AnswerParser:
        return AnswerParser(reasoning=self.reasoning, thinking=self.thinking, tools=self.tools)


def read_chat(body: dict, tokenizer: Tokenizer, n_ctx: int) -> GenerationRequest:
    """A chat completion request; raises ApiError."""
    prompt = _render(body, tokenizer)
    request = _read_generation(body, _prompt_ids(tokenizer, prompt.pieces, n_ctx), n_ctx)
    request.reasoning = body.get("reasoning_format") != "none"
    request.thinking = request.reasoning and prompt.text.rstrip().endswith(THINK)
    request.tools = bool(_tools(body))
    return request


def read_completion(body: dict, tokenizer: Tokenizer, n_ctx: int) -> GenerationRequest:
    """A text completion request in either dialect; raises ApiError."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadField("prompt", "expected a text or a list of token ids that is not empty")
    if len(prompt) > 1 and all(isinstance(piece, str) for piece in prompt):
        raise BadField("prompt", f"{len(prompt)} prompts in one request; send one request for each")
    ids: list[int] = []
    for piece in prompt:
        if isinstance(piece, str):
            ids += _encode(tokenizer, piece, n_ctx, bos=not ids)
        else:
            ids += check_ids("prompt", [piece], tokenizer)
    return _read_generation(body, ids, n_ctx)


def render_chat(body: dict, tokenizer: Tokenizer) -> str:
    """The messages of a body as the model's own template writes them; raises ApiError."""
    return _render(body, tokenizer).text


def _render(body: dict, tokenizer: Tokenizer) -> Prompt:
    tools = _tools(body)
    if tools and "tools" not in (tokenizer.chat_template or ""):
        raise BadField("tools", "the chat template of this model knows no tools; leave them out or load another model")
    variables = _optional(body, "chat_template_kwargs", dict, {})
    if reserved := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
        raise BadField("chat_template_kwargs", f"{min(reserved)!r} has a field of its own in the body")
    if effort := _optional(body, "reasoning_effort", str, None):
        variables = {"reasoning_effort": effort} | variables
    begin = _optional(body, "add_generation_prompt", bool, True)
    messages = _messages(body)
    try:
        # Marks that the model writes itself are marks again when its words come back.
        return tokenizer.render(messages, variables, tools=tools, add_generation_prompt=begin, kept=MARKS)
    except TokenizerError as error:
        raise ApiError(400, str(error)) from error


def check_ids(name: str, ids: object, tokenizer: Tokenizer) -> list[int]:
    """A list of token ids of this vocabulary; raises ApiError."""
    if not isinstance(ids, list):
        raise BadField(name, "expected a list of token ids")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < tokenizer.n_vocab:
            shown = json.dumps(token_id)[:40]
            raise BadField(name, f"{shown} is no token id; ids are whole numbers from 0 to {tokenizer.n_vocab - 1}")
    return ids


def _encode(tokenizer: Tokenizer, text: str, n_ctx: int, *, bos: bool = True) -> list[int]:
    try:
        pieces = tokenizer.pieces(text)
    except TokenizerError as error:
        raise ApiError(400, str(error)) from error
    return _prompt_ids(tokenizer, tokenizer.with_bos(pieces) if bos else pieces, n_ctx)


def _prompt_ids(tokenizer: Tokenizer, pieces: list[str | int], n_ctx: int) -> list[int]:
    """The ids of a prompt; one that cannot fit the context is refused before the work that its length would make."""
    n_bytes = sum(len(piece.encode()) if isinstance(piece, str) else 1 for piece in pieces)
    n_least = -(-n_bytes // tokenizer.longest_token_bytes)
    if n_least <= n_ctx:
        ids = tokenizer.prompt_ids(pieces, most=FAR_TOO_LONG * n_ctx)
        if len(ids) <= FAR_TOO_LONG * n_ctx:
            return ids
        n_least = len(ids)
    raise prompt_too_long(n_least, n_ctx, at_least=True)


def prompt_too_long(n_tokens: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """The refusal of a prompt that the context cannot hold."""
    return ApiError(
        400,
        f"the prompt of {'at least ' * at_least}{n_tokens} tokens exceeds the available context size of {n_ctx}:"
        f" it does not fit the context of {n_ctx}, of which {SPARE_CELLS} and one token of the answer must stay free;"
        " shorten it, or start the engine with a larger --max-context",
        "exceed_context_size_error",
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )


def _optional(body: dict, name: str, kind: type, default):
    """The value of a field; null is as good as absent."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        wanted = {dict: "an object", bool: "true or false", str: "a text", list: "a list"}[kind]
        raise BadField(name, f"expected {wanted}, found {json.dumps(value)[:40]}")
    return value


def _tools(body: dict) -> list | None:
    """The tools that the model may call; raises ApiError where a call would have to be forced."""
    tools, choice = _optional(body, "tools", list, None), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadField("tool_choice", "only 'auto' and 'none' are supported; a call cannot be forced")
    if not all(isinstance(tool, dict) for tool in tools or []):
        raise BadField("tools", "expected a list of objects")
    return tools if tools and choice != "none" else None


def _messages(body: dict) -> list[dict]:
    """The messages in the form that templates are written for: text content, tool arguments as objects."""
    messages = _optional(body, "messages", list, [])
    if not messages:
        raise BadField("messages", "expected a list of messages that is not empty")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadField(name, "expected an object with a role")
    role = "system" if message["role"] == "developer" else message["role"]
    calls = _optional(message, "tool_calls", list, [])
    content = message.get("content")
    if content is None and not calls and role != "assistant":
        raise BadField(f"{name}.content", "it is missing")
    message = message | {"role": role, "content": _text_content(f"{name}.content", content)}
    if calls:
        message["tool_calls"] = [_past_call(f"{name}.tool_calls", call) for call in calls]
    return message


def _text_content(name: str, content: object) -> str:
    """The text of a message, from a text or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(name, "expected a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadField(name, f"a part of type {json.dumps(kind)[:40]}: only text is supported by this engine")
        texts.append(part["text"])
    return "\n".join(texts)


def _past_call(name: str, call: object) -> dict:
    """A tool call of an earlier turn; its arguments are JSON text on the wire and an object in templates."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField(name, "expected objects with a function that has a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadField(name, f"the arguments of {function['name']!r} are not JSON") from None
    return call | {"function": function | {"arguments": arguments}}


def _read_generation(body: dict, ids: list[int], n_ctx: int) -> GenerationRequest:
    """The fields that all dialects share."""
    _refuse_unsupported(body)
    room = n_ctx - SPARE_CELLS - len(ids)
    if not ids:
        raise BadField("prompt", "it has no tokens")
    if room < 1:
        raise prompt_too_long(len(ids), n_ctx)
    options = _optional(body, "stream_options", dict, {})
    return GenerationRequest(
        ids=ids,
        max_new=min(_max_new(body) or room, room),
        sampling=_sampling(body, n_ctx),
        stops=_stops(body),
        stream=_optional(body, "stream", bool, False),
        with_usage=_optional(options, "include_usage", bool, False),
        with_progress=_optional(body, "return_progress", bool, False),
    )


def _refuse_unsupported(body: dict) -> None:
    for name in UNSUPPORTED:
        if body.get(name):
            raise BadField(name, "it is not supported by this engine; leave it out")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise BadField(name, "only one answer a request is supported")
    wanted = _optional(body, "response_format", dict, {}).get("type", "text")
    if wanted != "text":
        raise BadField("response_format", f"{json.dumps(wanted)[:40]} is not supported by this engine, only 'text'")


def _max_new(body: dict) -> int | None:
    """The limit on the answer; None where the field is absent, null, 0 or negative: as long as the context."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if body.get(name) is not None:
            return max(_whole(name, body[name]), 0) or None
    return None


def _whole(name: str, value: object) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise BadField(name, f"{json.dumps(value)[:40]} is not a whole number")
    return value


def _sampling(body: dict, n_ctx: int) -> dict[str, float | int]:
    """The sampling keys of the GEN line; without a temperature the engine takes the most likely token."""
    if body.get("repeat_penalty") is None and body.get("repetition_penalty") is not None:
        body = body | {"repeat_penalty": body["repetition_penalty"]}
    keys: dict[str, float | int] = {}
    for name, (low, high) in SAMPLING_RANGES.items():
        if (value := body.get(name)) is not None:
            if type(value) not in (int, float) or not (math.isfinite(value) and low <= value <= high):
                raise BadField(name, f"{json.dumps(value)[:40]} is not a number from {low:g} to {high:g}")
            keys[name] = float(value)
    if body.get("top_k") is not None:
        keys["top_k"] = min(max(_whole("top_k", body["top_k"]), 0), MAX_COUNT)
    if body.get("repeat_last_n") is not None:
        last = _whole("repeat_last_n", body["repeat_last_n"])
        keys["repeat_last_n"] = n_ctx if last < 0 else min(last, n_ctx)
    seed = -1 if body.get("seed") is None else _whole("seed", body["seed"])
    if keys.get("temperature"):
        keys["seed"] = secrets.randbits(31) if seed == -1 else seed & MAX_SEED
    return keys


def _stops(body: dict) -> tuple[str, ...]:
    stops = body.get("stop")
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops) or len(stops) > MAX_STOPS:
        raise BadField("stop", f"expected a text or a list of at most {MAX_STOPS} texts")
    return tuple(stop for stop in stops if stop)


# --- An answer, token by token ---


@dataclass
class Answer:
    """The text of an answer so far and, at the end, how it ended."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    stop_word: str | None = None
    source: Source | None = None
    done: Done | None = None

    @property
    def finish_reason(self) -> str:
        """In the words of the OpenAI dialect."""
        if self.stop_word is None and self.done.finish == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"


class AnswerReader:
    """Tokens to parts: decoded, cut at stop strings, sorted into content, reasoning and tool calls."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream()
        self._shown_marks = frozenset(mark_ids(tokenizer))
        self._stops = StopStrings(request.stops)
        self._parser = request.parser()
        self._tokens = ShownTokens()
        self.answer = Answer()

    def push(self, token_id: int) -> list[Part]:
        """The parts that one more token completes; none once a stop string was found."""
        self.answer.ids.append(token_id)
        text = self._decoder.push(token_id, special=token_id in self._shown_marks)
        hidden = token_id not in self._shown_marks and self._tokenizer.is_control(token_id)
        self._tokens.add(text, unfinished=self._decoder.unfinished, hidden=hidden)
        return self._take(self._parser.push(self._tokens.show(self._stops.push(text))))

    def finish(self, done: Done) -> list[Part]:
        """The parts that were held back."""
        self.answer.done = done
        text = self._tokens.show(self._stops.push(self._decoder.flush())) + self._stops.flush()
        return self._take(self._parser.push(text)) + self._take(self._parser.flush())

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing further is shown."""
        self.answer.stop_word = self._stops.found
        return self._stops.found is not None

    @property
    def n_shown(self) -> int:
        """How many of the answer's tokens lie wholly in the text before the stop string; all where none was found."""
        return len(self.answer.ids) if self._stops.found is None else self._tokens.count()

    def _take(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            if part.kind == "content":
                self.answer.content += part.text
            elif part.kind == "reasoning":
                self.answer.reasoning += part.text
            else:
                self.answer.calls.append(part.call)
        return parts


def mark_ids(tokenizer: Tokenizer) -> list[int]:
    """Control tokens that spell the markup of reasoning and tool calls: they are read as text, others are not shown."""
    spelled = (tokenizer.encode(mark, special=True) for mark in MARKS)
    return [ids[0] for ids in spelled if len(ids) == 1]


# --- What all dialects tell about an answer ---


def timings(done: Done, source: Source | None = None) -> dict:
    """The times of a request with the names of llama.cpp; ``prompt_n`` is what was really read."""
    result = {
        "cache_n": done.n_reused,
        "prompt_n": done.n_prompt_read,
        "prompt_ms": done.prompt_ms,
        "prompt_per_token_ms": _ratio(done.prompt_ms, done.n_prompt_read),
        "prompt_per_second": _ratio(1000 * done.n_prompt_read, done.prompt_ms),
        "predicted_n": done.n_generated,
        "predicted_ms": done.decode_ms,
        "predicted_per_token_ms": _ratio(done.decode_ms, done.n_generated),
        "predicted_per_second": _ratio(1000 * done.n_generated, done.decode_ms),
    }
    if source:
        result |= {"cache_source": source.source, "diverged_at": source.diverged_at}
    if done.n_drafts_offered:
        result |= {"draft_n": done.n_drafts_offered, "draft_n_accepted": done.n_drafts_accepted}
    return result


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def usage(done: Done) -> dict:
    """Token counts; ``prompt_tokens`` is the whole prompt, the cached part of it stands in both common places."""
    return {
        "prompt_tokens": done.n_prompt,
        "completion_tokens": done.n_generated,
        "total_tokens": done.n_prompt + done.n_generated,
        "prompt_tokens_details": {"cached_tokens": done.n_reused},
        "cache_read_input_tokens": done.n_reused,
    }


# --- The three dialects. Each writes a whole answer, and the events of a streamed one; `part` gets the ids since the
# event before ---


class ChatDialect:
    """``/v1/chat/completions``."""

    ends_with_done = True

    def __init__(self, request: GenerationRequest, model: str):
        self._request = request
        self._n_calls = 0
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, answer: Answer) -> dict:
        message: dict = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        numbers = {"usage": usage(answer.done), "timings": timings(answer.done, answer.source)}
        return {**self._head, "object": "chat.completion", "choices": [choice], **numbers}

    def first(self) -> list[dict]:
        return [self._event({"role": "assistant", "content": ""})]

    def progress(self, event: PromptProgress, n_reused: int, elapsed_ms: float) -> list[dict]:
        return [self._event({}, prompt_progress=_progress(event, n_reused, elapsed_ms))]

    def part(self, part: Part, ids: list[int]) -> dict:
        if part.kind == "tool_call":
            self._n_calls += 1
            return self._event({"tool_calls": [{"index": self._n_calls - 1, **_call(part.call)}]})
        return self._event({"reasoning_content" if part.kind == "reasoning" else "content": part.text})

    def last(self, answer: Answer) -> list[dict]:
        events = [self._event({}, answer.finish_reason, timings=timings(answer.done, answer.source))]
        if self._request.with_usage:
            numbers = {"usage": usage(answer.done), "timings": timings(answer.done, answer.source)}
            events.append({**self._head, "object": "chat.completion.chunk", "choices": [], **numbers})
        return events

    def _event(self, delta: dict, finish_reason: str | None = None, **extra) -> dict:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **extra}


def _call(call: ToolCall) -> dict:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _progress(event: PromptProgress, n_reused: int, elapsed_ms: float) -> dict:
    return {"total": event.n_prompt, "cache": n_reused, "processed": event.position, "time_ms": elapsed_ms}


class TextDialect:
    """``/v1/completions``."""

    ends_with_done = True

    def __init__(self, request: GenerationRequest, model: str):
        self._request = request
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        self._head = {**head, "model": model}

    def whole(self, answer: Answer) -> dict:
        numbers = {"usage": usage(answer.done), "timings": timings(answer.done, answer.source)}
        return self._event(answer.content, answer.finish_reason, **numbers)

    def first(self) -> list[dict]:
        return []

    def progress(self, event: PromptProgress, n_reused: int, elapsed_ms: float) -> list[dict]:
        return [self._event("", prompt_progress=_progress(event, n_reused, elapsed_ms))]

    def part(self, part: Part, ids: list[int]) -> dict:
        return self._event(part.text)

    def last(self, answer: Answer) -> list[dict]:
        events = [self._event("", answer.finish_reason, timings=timings(answer.done, answer.source))]
        if self._request.with_usage:
            numbers = {"usage": usage(answer.done), "timings": timings(answer.done, answer.source)}
            events.append({**self._head, "choices": [], **numbers})
        return events

    def _event(self, text: str, finish_reason: str | None = None, **extra) -> dict:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice], **extra}


class NativeDialect:
    """``/completion`` of llama.cpp: no ``choices``, and the event with ``stop`` true ends the stream."""

    ends_with_done = False

    def __init__(self, request: GenerationRequest, model: str):
        self._request = request
        self._model = model

    def whole(self, answer: Answer) -> dict:
        return self._end(answer, answer.content)

    def first(self) -> list[dict]:
        return []

    def progress(self, event: PromptProgress, n_reused: int, elapsed_ms: float) -> list[dict]:
        progress = {"prompt_progress": _progress(event, n_reused, elapsed_ms)}
        return [{"index": 0, "id_slot": 0, "content": "", "tokens": [], "stop": False, **progress}]

    def part(self, part: Part, ids: list[int]) -> dict:
        return {"index": 0, "id_slot": 0, "content": part.text, "tokens": ids, "stop": False}

    def last(self, answer: Answer) -> list[dict]:
        return [self._end(answer, "") | {"tokens": []}]

    def _end(self, answer: Answer, content: str) -> dict:
        done = answer.done
        stop_type = "word" if answer.stop_word else {"stop": "eos", "length": "limit"}.get(done.finish, "none")
        return {
            "index": 0,
            "id_slot": 0,
            "content": content,
            "tokens": answer.ids,
            "stop": True,
            "model": self._model,
            "stop_type": stop_type,
            "stopping_word": answer.stop_word or "",
            "tokens_predicted": done.n_generated,
            "tokens_evaluated": done.n_prompt,
            "tokens_cached": done.n_reused,
            "truncated": False,
            "generation_settings": {"n_predict": self._request.max_new, **self._request.sampling},
            "timings": timings(done, answer.source),
        }


Dialect = ChatDialect | TextDialect | NativeDialect
ReadBody = Callable[[dict, Tokenizer, int], GenerationRequest]
