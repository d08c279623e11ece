"""The conversation that the engine holds, from its tokens back to messages.

Owns the marks with which chat templates begin and end turns. Refuses to run templates. Invariant: turns are cut at
tokens alone, so that text which only looks like a mark stays text; where a model's marks are not known, there are no
messages.

Read next: ``httpfront.py``, which answers with this; ``httppage.py``, which shows it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from httpanswer import END_THINK, THINK
from httpmessages import MAX_SAID, first_words, label_of
from tokenizer import Tokenizer


class Form(NamedTuple):
    """How a family of templates writes turns.

    ``begins`` names the role that a mark begins a turn of, None where the role follows in text, up to ``role_end``.
    ``loose`` is the role of what stands before the first turn, None where nothing may.
    """

    begins: dict[str, str | None]
    role_end: str
    ends: tuple[str, ...]
    loose: str | None = None


FORMS = (
    Form({"<|im_start|>": None}, "<|im_sep|>", ("<|im_end|>",)),
    Form({"<|im_start|>": None}, "\n", ("<|im_end|>",)),
    Form({"<|start_header_id|>": None}, "<|end_header_id|>", ("<|eot_id|>", "<|eom_id|>")),
    Form({"<|start_of_role|>": None}, "<|end_of_role|>", ("<|end_of_text|>",)),
    Form({"<｜User｜>": "user", "<｜Assistant｜>": "assistant"}, "", ("<｜end▁of▁sentence｜>",), "system"),
    Form(
        {"<|SYSTEM_TOKEN|>": "system", "<|USER_TOKEN|>": "user", "<|CHATBOT_TOKEN|>": "assistant"},
        "",
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    Form({"[SYSTEM_PROMPT]": "system", "[INST]": "user", "[/INST]": "assistant"}, "", ("[/SYSTEM_PROMPT]", "</s>")),
)


def conversation(ids: Sequence[int], tokenizer: Tokenizer) -> dict:
    """Number of tokens and messages of what is held; the whole text in place of messages that cannot be told apart."""
    messages = read_messages(ids, tokenizer)
    known = {"messages": messages} if messages is not None else {"messages": None, "text": tokenizer.decode(ids)}
    return {"n_tokens": len(ids), **known}


def first_words_of(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """By what a person knows a conversation again."""
    messages = read_messages(ids, tokenizer)
    return first_words(messages) if messages else label_of(tokenizer.decode(ids[:MAX_SAID], special=False))


def read_messages(ids: Sequence[int], tokenizer: Tokenizer) -> list[dict] | None:
    """The messages whose turns these ids are; None where they are no turns of a known form."""
    if not ids:
        return []
    form, marks = _form_of(tokenizer)
    if form is None:
        return None
    loose, turns = _cut(ids, tokenizer, form, marks)
    before = tokenizer.decode(loose, special=False).strip()
    if before and form.loose is None:
        return None
    messages = [_message(role, turn, form, tokenizer) for role, turn in turns]
    first = [{"role": form.loose, "content": before}] if before else []
    return first + [message for message in messages if message]


def _form_of(tokenizer: Tokenizer) -> tuple[Form | None, dict[int, str]]:
    """The form of this model's template, and its marks by id."""
    template = tokenizer.chat_template or ""
    for form in FORMS:
        # A mark for system texts may be missing, and ends may come from the tokenizer alone.
        needed = {mark for mark, role in form.begins.items() if role != "system"}
        needed |= {form.role_end} if form.role_end.strip() else set()
        marks = {_mark_id(tokenizer, mark): mark for mark in {*needed, *form.begins, *form.ends}}
        marks.pop(None, None)
        if needed <= set(marks.values()) and all(mark in template for mark in needed):
            return form, marks
    return None, {}


def _mark_id(tokenizer: Tokenizer, mark: str) -> int | None:
    ids = tokenizer.encode(mark, special=True)
    return ids[0] if len(ids) == 1 else None


def _cut(
    ids: Sequence[int], tokenizer: Tokenizer, form: Form, marks: dict[int, str]
) -> tuple[list[int], list[tuple[str | None, list[int]]]]:
    """The ids outside of turns, and the turns: role (None where its text is still before the words) and ids."""
    loose: list[int] = []
    turns: list[tuple[str | None, list[int]]] = []
    into = loose
    for token_id in ids:
        mark = marks.get(token_id)
        if mark in form.begins:
            into = []
            turns.append((form.begins[mark], into))
        elif mark in form.ends:
            into = loose
        elif mark is not None and into is not loose and turns[-1][0] is None:
            role = tokenizer.decode(into).strip()
            into = []
            turns[-1] = (role, into)
        else:
            into.append(token_id)
    return loose, turns


def _message(role: str | None, turn: list[int], form: Form, tokenizer: Tokenizer) -> dict | None:
    """A turn as a message, thinking apart; None for one that was only begun."""
    text, head = tokenizer.decode(turn), "\n\n"
    if role is None:
        role, found, _ = text.partition(form.role_end)
        head = role + form.role_end
        if not found:
            return None
    content, thought = text.removeprefix(head), ""
    if role == "assistant" and content.lstrip().startswith(THINK):
        before, content = _parted(turn, tokenizer)
        thought = before.removeprefix(head).lstrip().removeprefix(THINK).strip()
        content = content.lstrip("\n")
    if role == "assistant" and not content and not thought:
        return None
    return {"role": role, "content": content} | ({"reasoning_content": thought} if thought else {})


def _parted(turn: list[int], tokenizer: Tokenizer) -> tuple[str, str]:
    """The text of a turn before and behind the end of its thinking, which is a token where the model has one for it."""
    end = _mark_id(tokenizer, END_THINK)
    if end is None:
        before, _, behind = tokenizer.decode(turn).partition(END_THINK)
        return before, behind
    cut = turn.index(end) if end in turn else len(turn)
    return tokenizer.decode(turn[:cut]), tokenizer.decode(turn[cut + 1 :])
