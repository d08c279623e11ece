"""Request bodies to prompts and GEN lines, answers to the JSON of three dialects: OpenAI chat, OpenAI text, llama.cpp.

Owns the names of fields, their ranges and what is refused; refuses to know sockets, pipes and the queue. Invariant: a
body that comes through here makes a GEN line that the engine accepts, for any other the client is told what is wrong.

Read next: ``httproutes.py``, which calls this for each request; ``httpanswer.py``, which cuts answers into parts.
"""

import secrets
import time
from dataclasses import dataclass, field

from httpanswer import CALL_MARKS, MARKS, THINK, AnswerParser, MarkPlaces, Part, ShownTokens, StopStrings
from httpfields import ApiError, BadField, optional, shown
from httpmessages import Chat, Tools, first_words, read_chat_body, read_tools
from httpsampling import model_defaults, read_limit, read_sampling, read_stops, refuse_unsupported
from httptools import ToolCall, bare_form, schemas_of
from tokenizer import Prompt, Tokenizer, TokenizerError
from verbs import SPARE_CELLS, Done, PromptProgress, Source, gen_line, label_key

# Prompts of up to so many contexts are counted exactly when they are refused.
FAR_TOO_LONG = 2


# --- Reading a body ---


@dataclass
class GenerationRequest:
    """What a body asks for, checked; ``line`` makes it a GEN line."""

    ids: list[int]
    max_new: int
    sampling: dict[str, float | int]
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    kept: bool = True
    stream: bool = False
    with_usage: bool = False
    with_progress: bool = False
    with_marks: bool = False
    reasoning: bool = False
    thinking: bool = False
    continued: bool = False
    tools: bool = False
    described: bool = False  # the prompt spells the marks of calls out, so that the model may do so as well
    schemas: dict[str, object] = field(default_factory=dict)
    bare_calls: str = ""
    label: str = ""  # the first words of the conversation
    one_call: bool = False
    legacy_call: bool = False
    # What was done otherwise than asked, for a header of the answer and the log.
    notices: tuple[str, ...] = ()

    def line(self, end_ids: frozenset[int]) -> str:
        """The GEN line; the answer also stops at ``end_ids``."""
        keys: dict[str, object] = dict(self.sampling)
        if stop_ids := end_ids | self.stop_ids:
            keys["stop"] = ",".join(map(str, sorted(stop_ids)))
        if not self.kept:
            keys["ckpt"] = 0
        if self.label:
            keys["label"] = label_key(self.label)
        return gen_line(self.max_new, self.ids, keys | {"source": 1})

    def parser(self, token_marks: set[str]) -> AnswerParser:
        return AnswerParser(
            reasoning=self.reasoning,
            thinking=self.thinking,
            continued=self.continued,
            tools=self.tools,
            schemas=self.schemas,
            bare=self.bare_calls,
            token_marks=token_marks,
        )


def read_chat(body: dict, tokenizer: Tokenizer, n_ctx: int) -> GenerationRequest:
    """A chat completion request; raises ApiError."""
    chat, tools = read_chat_body(body, tokenizer.chat_template or ""), read_tools(body)
    prompt = _rendered(chat, body, tokenizer)
    request = _read_generation(body, _prompt_ids(tokenizer, prompt.pieces, n_ctx), tokenizer, n_ctx)
    request.reasoning = body.get("reasoning_format") != "none"
    request.thinking = request.reasoning and (chat.thinking or prompt.text.rstrip().endswith(THINK))
    request.continued = bool(chat.mark)
    request.label = first_words(chat.messages)
    request.notices, request.described = chat.notices, bool(chat.notices)
    _set_tools(request, tools, tokenizer)
    return request


def _set_tools(request: GenerationRequest, tools: Tools, tokenizer: Tokenizer) -> None:
    request.tools, request.schemas = bool(tools.offered), schemas_of(tools.offered)
    request.one_call, request.legacy_call = tools.one_call, tools.legacy
    request.bare_calls = bare_form(tokenizer.chat_template or "")


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
    return _read_generation(body, ids, tokenizer, n_ctx)


def render_chat(body: dict, tokenizer: Tokenizer) -> str:
    """The messages of a body as the model's own template writes them; raises ApiError."""
    return _rendered(read_chat_body(body, tokenizer.chat_template or ""), body, tokenizer).text


def _rendered(chat: Chat, body: dict, tokenizer: Tokenizer) -> Prompt:
    variables = optional(body, "chat_template_kwargs", dict, {})
    if reserved := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
        raise BadField("chat_template_kwargs", f"{min(reserved)!r} has a field of its own in the body")
    for name, kind in (("reasoning_effort", str), ("enable_thinking", bool)):
        if (value := optional(body, name, kind, None)) is not None:
            variables = {name: value} | variables
    options = {"tools": chat.tools, "add_generation_prompt": chat.begins}
    try:
        # Marks that the model writes itself are marks again when its words come back.
        return chat.cut(tokenizer.render(chat.messages, variables, **options, kept=MARKS))
    except TokenizerError as error:
        raise ApiError(400, str(error)) from error


def check_ids(name: str, ids: object, tokenizer: Tokenizer) -> list[int]:
    """A list of token ids of this vocabulary; raises ApiError."""
    if not isinstance(ids, list):
        raise BadField(name, "expected a list of token ids")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < tokenizer.n_vocab:
            least = f"ids are whole numbers from 0 to {tokenizer.n_vocab - 1}"
            raise BadField(name, f"{shown(token_id)} is no token id; {least}")
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
    raise exceeds_context(n_least, n_ctx, at_least=True)


def _read_generation(body: dict, ids: list[int], tokenizer: Tokenizer, n_ctx: int) -> GenerationRequest:
    """The fields that all dialects share."""
    refuse_unsupported(body)
    if not ids:
        raise BadField("prompt", "it has no tokens")
    limit, room = read_limit(body), n_ctx - SPARE_CELLS - len(ids)
    if room < (limit != 0):
        raise exceeds_context(len(ids), n_ctx)
    options = optional(body, "stream_options", dict, {})
    defaults, _ = model_defaults(tokenizer.sampling)
    return GenerationRequest(
        ids=ids,
        max_new=room if limit is None else min(limit, room),
        sampling=read_sampling(body, defaults, n_ctx),
        stops=read_stops(body),
        stop_ids=frozenset(check_ids("stop_token_ids", optional(body, "stop_token_ids", list, []), tokenizer)),
        kept=optional(body, "cache_prompt", bool, True),
        stream=optional(body, "stream", bool, False),
        with_usage=optional(options, "include_usage", bool, False),
        with_progress=optional(body, "return_progress", bool, False),
        with_marks=not optional(body, "skip_special_tokens", bool, True),
    )


def exceeds_context(n_prompt: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """The refusal of a prompt of so many tokens; ``at_least``: it was too long to be counted."""
    return ApiError(
        400,
        # Clients look for the words "exceeds the available context size".
        f"the prompt of {'at least ' * at_least}{n_prompt} tokens exceeds the available context size: it does not fit"
        f" the context of {n_ctx}, of which {SPARE_CELLS} and one token of the answer must stay free; shorten it, or"
        " start the engine with a larger --max-context",
        "exceed_context_size_error",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


# --- An answer, token by token ---


@dataclass
class Answer:
    """The text of an answer so far and, at the end, how it ended."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    stop_word: str | None = None
    done: Done | None = None
    source: Source | None = None

    @property
    def finish_reason(self) -> str:
        """In the words of the OpenAI dialect."""
        if self.stop_word is None and self.done.finish == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"


class AnswerReader:
    """Tokens to parts: decoded, cut at stop strings, sorted into content, reasoning and tool calls."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer):
        self._request, self._tokenizer, self._decoder = request, tokenizer, tokenizer.stream()
        in_text = CALL_MARKS if request.described else ()
        self._marks = {tokenizer.mark_id(mark): mark for mark in MARKS if mark not in in_text}
        self._marks.pop(None, None)
        # A mark that ends the answer as a stop string is looked for like text; the model's own ends are no such.
        stops = {tokenizer.mark_id(mark) for mark in (*request.stops, *in_text)} - {None, *tokenizer.end_ids}
        self._shown = frozenset(tokenizer.control_ids - tokenizer.end_ids if request.with_marks else stops)
        self._stops, self._places = StopStrings(request.stops), MarkPlaces()
        self._parser = request.parser(set(self._marks.values()))
        self._calls_ended = False
        self._tokens = ShownTokens()
        self.answer = Answer()

    def push(self, token_id: int) -> list[Part]:
        """The parts that one more token completes; none once a stop string was found."""
        self.answer.ids.append(token_id)
        if token_id in self._request.stop_ids:
            self._tokens.add("", unfinished=False, hidden=True)
            return []
        if token_id in self._marks:
            flushed, mark = self._decoder.flush(), self._marks[token_id]
            self._tokens.add(flushed + mark, unfinished=False, hidden=False)
            return self._read(flushed) + self._read(mark, is_mark=True)
        text = self._decoder.push(token_id, special=token_id in self._shown)
        hidden = token_id not in self._shown and self._tokenizer.is_control(token_id)
        self._tokens.add(text, unfinished=self._decoder.unfinished, hidden=hidden)
        return self._read(text)

    def finish(self, done: Done) -> list[Part]:
        """The parts that were held back."""
        self.answer.done = done
        parts = self._read(self._decoder.flush())
        parts += self._parse(self._stops.flush())
        parts += self._take(self._parser.push(self._places.flush()))
        return parts + self._take(self._parser.flush())

    @property
    def stopped(self) -> bool:
        """A stop string was found, or the one call that is wanted has come: nothing further is shown."""
        self.answer.stop_word = self._stops.found
        return self._stops.found is not None or self._calls_ended

    @property
    def n_shown(self) -> int:
        """How many of the answer's tokens lie wholly in the text before the stop string; all where none was found."""
        return len(self.answer.ids) if self._stops.found is None else self._tokens.count()

    def _read(self, text: str, *, is_mark: bool = False) -> list[Part]:
        self._places.add(text, is_mark=is_mark)
        return self._parse(self._tokens.show(self._stops.push(text)))

    def _parse(self, text: str) -> list[Part]:
        pieces = self._places.take(text)
        return [part for piece, is_mark in pieces for part in self._take(self._parser.push(piece, is_mark=is_mark))]

    def _take(self, parts: list[Part]) -> list[Part]:
        taken = []
        for part in parts:
            if self._calls_ended:
                break
            taken.append(part)
            if part.kind == "content":
                self.answer.content += part.text
            elif part.kind == "reasoning":
                self.answer.reasoning += part.text
            else:
                self.answer.calls.append(part.call)
                self._calls_ended = self._request.one_call
        return taken


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
        if answer.calls and self._request.legacy_call:
            message["function_call"] = _call(answer.calls[0])["function"]
        elif answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(answer)}
        numbers = {"usage": usage(answer.done), "timings": timings(answer.done, answer.source)}
        return {**self._head, "object": "chat.completion", "choices": [choice], **numbers}

    def first(self) -> list[dict]:
        return [self._event({"role": "assistant", "content": ""})]

    def progress(self, event: PromptProgress, n_reused: int, elapsed_ms: float) -> list[dict]:
        return [self._event({}, prompt_progress=_progress(event, n_reused, elapsed_ms))]

    def part(self, part: Part, ids: list[int]) -> dict:
        if part.kind == "tool_call" and self._request.legacy_call:
            return self._event({"function_call": _call(part.call)["function"]})
        if part.kind == "tool_call":
            self._n_calls += 1
            return self._event({"tool_calls": [{"index": self._n_calls - 1, **_call(part.call)}]})
        return self._event({"reasoning_content" if part.kind == "reasoning" else "content": part.text})

    def last(self, answer: Answer) -> list[dict]:
        events = [self._event({}, self._reason(answer), timings=timings(answer.done, answer.source))]
        if self._request.with_usage:
            numbers = {"usage": usage(answer.done), "timings": timings(answer.done, answer.source)}
            events.append({**self._head, "object": "chat.completion.chunk", "choices": [], **numbers})
        return events

    def _reason(self, answer: Answer) -> str:
        legacy = answer.finish_reason == "tool_calls" and self._request.legacy_call
        return "function_call" if legacy else answer.finish_reason

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
