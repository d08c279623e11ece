"""Text to token ids and back.

It owns the way from a GGUF file's tokenizer metadata to the `tokenizers` library, and the marks in a text: which of
them are ids and which are words. It knows nothing of models, sessions or protocols. Invariant: decoding the ids of a
text gives that text (in its NFC form where the model asks for it). Read next: chattemplate.py, which writes messages
as text, and modelfile.py, which opens the file.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from chattemplate import ChatTemplate, TemplateFault
from modelfile import (
    GgufError,
    end_token_ids,
    open_gguf,
    sampling_metadata,
    tokenizer_metadata,
    turn_start_id,
)

# How a text is cut into words before byte pairs are merged, by the names that converters write into tokenizer.ggml.pre.
# A model was trained with one of these; another one gives other ids for the same text.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES_AND_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES_AND_BLANKS}"
QWEN35_WORDS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES_AND_BLANKS}"
)
LLAMA3_WORDS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES_AND_BLANKS}"
)
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_WORDS,),
    "olmo": (GPT2_WORDS,),
    "smollm": (DIGIT, GPT2_WORDS),
    "starcoder": (DIGIT, GPT2_WORDS),
    "refact": (DIGIT, GPT2_WORDS),
    "command-r": (DIGIT, GPT2_WORDS),
    "qwen2": (QWEN2_WORDS,),
    "deepseek-r1-qwen": (QWEN2_WORDS,),
    "qwen35": (QWEN35_WORDS,),
    "llama-bpe": (LLAMA3_WORDS,),
}
NFC_FAMILIES = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35"})
LLAMA3_FAMILIES = frozenset(
    {"llama-bpe"}
)  # words of the vocabulary are taken whole; a start token unless the file says no

# What the metadata must be, where it is there: a list of these, or one of these.
LIST_KEYS = {"ggml.tokens": str, "ggml.token_type": int, "ggml.merges": str}
END_ID_KEYS = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")
ID_KEYS = ("ggml.bos_token_id", *END_ID_KEYS)
PLAIN_KEYS = {"ggml.pre": str, "chat_template": str, "ggml.add_bos_token": bool} | dict.fromkeys(ID_KEYS, int)

# Token types of the GGUF specification. Normal tokens are spelled in the byte alphabet, the others in plain text.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# Texts are encoded in pieces of about so many characters: the library needs 150 bytes for each byte that it works on.
PIECE_CHARACTERS = 1 << 16
# Here every pre-tokenizer ends a word, whatever comes before and after.
WORD_END = re.compile(r"[!-~](?:\n(?=[A-Za-z])|(?= [A-Za-z]))")


class TokenizerError(Exception):
    """A tokenizer, a text, an id or a chat template that cannot be used; one line."""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, as introduced with GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Prompt(NamedTuple):
    """What a chat template made of messages: the text, the same as words and control tokens, the times it was told."""

    text: str
    pieces: list[str | int]
    clock: dict[str, str]

    def before(self, words: str) -> "Prompt | None":
        """The prompt up to the last place of these words; None where they are nowhere."""
        for index in reversed(range(len(self.pieces))):
            piece = self.pieces[index]
            if isinstance(piece, str) and words in piece:
                pieces = [*self.pieces[:index], piece.rpartition(words)[0]]
                return Prompt(self.text.rpartition(words)[0], [one for one in pieces if one != ""], self.clock)
        return None


class Tokenizer:
    """The tokenizer of one model file."""

    def __init__(self, metadata: dict[str, object]):
        """Take a file's `tokenizer.*` metadata, keys without that prefix; raises TokenizerError."""
        _check_types(metadata)
        self.metadata = metadata
        self._tokens: list[str] = metadata["ggml.tokens"]
        types: list[int] = metadata.get("ggml.token_type") or [1] * len(self._tokens)
        if len(types) != len(self._tokens):
            raise TokenizerError(f"{len(self._tokens)} tokens, but {len(types)} token types")
        pre = metadata.get("ggml.pre", "default")
        unmarked = _unmarked(metadata, types)
        self._types = [CONTROL if i in unmarked else kind for i, kind in enumerate(types)] if unmarked else types
        self.n_vocab = len(self._tokens)
        self.chat_template: str | None = metadata.get("chat_template")
        self.bos_id, self.eos_id = (self._known_id(metadata, key) for key in ("bos_token_id", "eos_token_id"))
        self.add_bos = bool(metadata.get("ggml.add_bos_token", pre in LLAMA3_FAMILIES)) and self.bos_id is not None
        self.end_ids = end_token_ids(metadata)
        self.guesses = _guesses(metadata, unmarked, self.end_ids)
        self._composes = pre in NFC_FAMILIES
        self._control = self._ids_of(UNKNOWN, CONTROL)
        self._missing = frozenset(BYTE_OF[char] for char in BYTE_OF.keys() - set(self._tokens))
        self._plain = self._library(metadata.get("ggml.merges") or [], pre)
        # What the file says below `general.sampling.`: how its model is to be sampled, for whoever answers with it.
        self.sampling: dict[str, object] = metadata.get("sampling", {})

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """The tokenizer in a GGUF file (of a split one: its first part)."""
        try:
            fields = open_gguf(path).fields
            metadata, sampling = tokenizer_metadata(fields), sampling_metadata(fields)
        except GgufError as error:
            raise TokenizerError(str(error)) from error
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: the tokenizer's metadata is not UTF-8: {error}") from error
        kind = metadata.get("ggml.model", "none")
        if kind == "none" or "ggml.tokens" not in metadata:
            raise TokenizerError(f"{path}: no tokenizer in this file; token ids work without one, text does not")
        if kind != "gpt2":
            raise TokenizerError(
                f"{path}: tokenizer type {kind!r} is not supported, only 'gpt2' (byte-level BPE);"
                " token ids work without it, text does not"
            )
        try:
            return cls(metadata | {"sampling": sampling})
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """The token ids of a text.

        With `special`, control tokens spelled out in the text become their ids, as rendered messages need it; else they
        are text like any other. With `bos`, the start token comes first where the model asks for it and none is there.
        """
        pieces = self.pieces(text, special=special)
        return self.encode_pieces(self.with_bos(pieces) if bos else pieces)

    def pieces(self, text: str, *, special: bool = True, seal: str = "") -> list[str | int]:
        """A text cut at its control tokens, which are ids in the list; `seal` parts what only looks like one.

        Words are in the form in which the model reads them. Raises TokenizerError for a text that has none.
        """
        self._check_text(text)
        pieces, words = [], []
        for part in self._split(text, special, seal):
            if isinstance(part, int):
                pieces += ["".join(words), part]
                words = []
            else:
                words.append(part)
        return [piece for piece in [*pieces, "".join(words)] if piece != ""]

    def encode_pieces(self, pieces: Iterable[str | int], *, most: int | None = None) -> list[int]:
        """The ids of words and control tokens as `pieces` gives them; with `most` it ends soon after so many."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            for part in self._encode_words(piece):
                ids += part
                if most is not None and len(ids) > most:
                    return ids
        return ids

    def prompt_ids(self, pieces: Iterable[str | int], *, most: int | None = None) -> list[int]:
        """The ids that a model is given for a prompt."""
        return self.encode_pieces(pieces, most=most)

    def may_cut(self, left: str, right: str) -> bool:
        """Whether the ids of two texts, one behind the other, are those of both in one."""
        return self.encode(left) + self.encode(right) == self.encode(left + right)

    def _check_text(self, text: str) -> None:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text that is not Unicode: a lone surrogate at character {error.start}") from error
        if self._missing and (lacking := self._missing.intersection(raw)):
            raise TokenizerError(f"the vocabulary has no token for the byte {min(lacking):#04x} of this text")

    def _split(self, text: str, special: bool, seal: str) -> Iterator[str | int]:
        """Control tokens as ids, and the text between them, in parts."""
        end = 0
        for found in (self._spelled(seal) if special else self._named).finditer(text):
            token_id = self._id_of[found[0]]
            yield self._composed(text[end : found.start()], seal)
            # A word that the vocabulary has by its own name is never composed with what stands beside it.
            yield token_id if token_id in self._control else found[0]
            end = found.end()
        yield self._composed(text[end:], seal)

    def _composed(self, text: str, seal: str) -> str:
        if seal:
            text = text.replace(seal, "")
        return unicodedata.normalize("NFC", text) if self._composes else text

    def _encode_words(self, text: str) -> Iterator[list[int]]:
        """The ids of a text without control tokens, part by part."""
        end = 0
        for found in self._named.finditer(text):
            yield from self._encode_plain(text[end : found.start()])
            yield [self._id_of[found[0]]]
            end = found.end()
        yield from self._encode_plain(text[end:])

    def _encode_plain(self, text: str) -> Iterator[list[int]]:
        start = 0
        while len(text) > start:
            cut = WORD_END.search(text, start + PIECE_CHARACTERS)
            end = cut.end() if cut else len(text)
            # `encode` would hold the interpreter's lock meanwhile.
            yield self._plain.encode_batch([text[start:end]], add_special_tokens=False)[0].ids
            start = end

    def with_bos(self, pieces: list[str | int]) -> list[str | int]:
        """The pieces behind the start token, where the model asks for it and none is there."""
        return [self.bos_id, *pieces] if self.add_bos and pieces[:1] != [self.bos_id] else pieces

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 come out as U+FFFD, control tokens only with `special`."""
        decoder = self.stream()
        return "".join([decoder.push(token_id, special=special) for token_id in ids]) + decoder.flush()

    def stream(self) -> "StreamDecoder":
        """A decoder for tokens that come one by one."""
        return StreamDecoder(self)

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a mark and no text; raises TokenizerError for an id outside the vocabulary."""
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.n_vocab}")
        return token_id in self._control

    @property
    def control_ids(self) -> frozenset[int]:
        """The tokens that are marks and no text."""
        return self._control

    def mark_id(self, text: str) -> int | None:
        """The control or user-defined token that is spelled so, if there is one."""
        token_id = self._id_of.get(text)
        return token_id if token_id is not None and self._types[token_id] != UNKNOWN else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they may be a part of a character."""
        token = self._tokens[token_id]
        if self._types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED):
            return token.encode()
        try:
            return bytes([BYTE_OF[char] for char in token])
        except KeyError:  # a padding token outside the byte alphabet
            return token.encode()

    def render(
        self,
        messages: list[dict],
        variables: dict,
        *,
        tools: list | None = None,
        add_generation_prompt: bool = True,
        kept: tuple[str, ...] = (),
        clock: dict[str, str] | None = None,
    ) -> Prompt:
        """Messages as the text that the model's chat template makes of them; `variables` are further names in it.

        Control tokens are ids only where the template wrote them, and where the assistant's words hold one of `kept`.
        """
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        marks = {name: self._tokens[token_id] for name, token_id in names.items() if token_id is not None}
        asked = variables | {"messages": messages, "tools": tools}
        trusted = marks | {"add_generation_prompt": add_generation_prompt}
        try:
            text, seal, told = self._template.render(trusted, asked, kept=kept, clock=clock)
        except TemplateFault as fault:
            raise TokenizerError(str(fault)) from fault
        pieces = self.with_bos(self.pieces(text, seal=seal))
        return Prompt(text.replace(seal, "") if seal else text, pieces, told)

    def render_chat(self, messages: list[dict], *, tools=None, add_generation_prompt=True, **variables) -> str:
        """The text of messages; `variables` are further names in the template."""
        return self.render(messages, variables, tools=tools, add_generation_prompt=add_generation_prompt).text

    def encode_chat(self, messages: list[dict], *, tools=None, add_generation_prompt=True, **variables) -> list[int]:
        """The token ids of messages through the model's chat template."""
        prompt = self.render(messages, variables, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode_pieces(prompt.pieces)

    def _known_id(self, metadata: dict[str, object], key: str) -> int | None:
        token_id = metadata.get(f"ggml.{key}")
        if token_id is not None and not 0 <= token_id < len(self._tokens):
            raise TokenizerError(f"{key} is {token_id}, outside the vocabulary of {len(self._tokens)}")
        return token_id

    def _ids_of(self, *kinds: int) -> frozenset[int]:
        return frozenset(i for i, kind in enumerate(self._types) if kind in kinds)

    @cached_property
    def _id_of(self) -> dict[str, int]:
        """The tokens that are taken whole wherever they are spelled, by their spelling."""
        whole = sorted(self._control | self._ids_of(USER_DEFINED))
        return {self._tokens[i]: i for i in whole if self._tokens[i]}

    @cached_property
    def _named(self) -> re.Pattern:
        return _any_of(token for token, i in self._id_of.items() if i not in self._control)

    def _spelled(self, seal: str) -> re.Pattern:
        """What finds these tokens, the longest first, as the library did; one before the seal is none."""
        if seal not in self._patterns:
            self._patterns[seal] = _any_of(self._id_of, f"(?!{seal})" if seal else "")
        return self._patterns[seal]

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern]:
        return {}

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes."""
        return max((len(self.token_bytes(i)) for i in range(self.n_vocab)), default=1)

    def _library(self, merges: list[str], pre: str) -> LibraryTokenizer:
        """The library's tokenizer for words; tokens that are taken whole are found before it sees a text."""
        if pre not in PRE_TOKENIZERS:
            raise TokenizerError(f"pre-tokenizer {pre!r} is not supported; known are {', '.join(PRE_TOKENIZERS)}")
        library = LibraryTokenizer(self._library_model(merges, ignore_merges=pre in LLAMA3_FAMILIES))
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if self._composes:
            library.normalizer = normalizers.NFC()
        library.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
        return library

    def _library_model(self, merges: list[str], *, ignore_merges: bool) -> models.BPE:
        normal = (token for token, kind in zip(self._tokens, self._types, strict=True) if kind == 1)
        if not merges and any(len(token) > 1 for token in normal):
            raise TokenizerError("the vocabulary has words, but no merges that lead to them")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        vocabulary = {token: token_id for token_id, token in enumerate(self._tokens)}
        try:
            return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"merges do not fit the vocabulary: {error}") from error

    @cached_property
    def _template(self) -> ChatTemplate:
        if not self.chat_template:
            raise TokenizerError("the model has no chat template: give it plain text")
        return ChatTemplate(self.chat_template, (self._tokens[i] for i in self._control))


def _any_of(words: Iterable[str], behind: str = "") -> re.Pattern:
    by_first: dict[str, list[str]] = {}
    for word in sorted(words, key=len, reverse=True):
        by_first.setdefault(word[0], []).append(re.escape(word))
    # Grouped like this, most of them are ruled out by one comparison.
    groups = [f"(?:{'|'.join(group)})" for group in by_first.values()]
    # Without words, a pattern that nothing matches.
    return re.compile(f"(?:{'|'.join(groups)}){behind}" if groups else r"(?!)")


# --- What a file leaves open ---


def _unmarked(metadata: dict[str, object], types: list[int]) -> list[int]:
    """The tokens that end an answer or start a turn, look like marks, and are words to the file."""
    tokens, named = metadata["ggml.tokens"], {metadata.get(key) for key in ID_KEYS} | end_token_ids(metadata)
    known = {i for i in (*named, turn_start_id(metadata)) if i is not None and 0 <= i < len(tokens)}
    return sorted(i for i in known if types[i] not in (UNKNOWN, CONTROL) and re.fullmatch(r"<.+>|\[.+\]", tokens[i]))


def _guesses(metadata: dict[str, object], unmarked: list[int], end_ids: frozenset[int]) -> list[str]:
    """A line for everything that the file does not say and that other ids or answers could come from."""
    tokens, lines = metadata["ggml.tokens"], []
    if "ggml.pre" not in metadata:
        lines.append("the model file has no tokenizer.ggml.pre: texts are cut into words as by 'default', which may")
        lines[-1] += " give other token ids than the model was trained on"
    if not metadata.get("ggml.token_type"):
        lines.append("the model file has no tokenizer.ggml.token_type: every token is taken for a word")
    if unmarked:
        named = ", ".join(repr(tokens[i]) for i in unmarked)
        lines.append(f"the model file has these tokens as words, they are taken for control tokens: {named}")
    if metadata.get("ggml.pre") in LLAMA3_FAMILIES and "ggml.add_bos_token" not in metadata:
        lines.append("the model file has no tokenizer.ggml.add_bos_token: prompts begin with the start token")
    if metadata.get("ggml.add_bos_token") and metadata.get("ggml.bos_token_id") is None:
        lines.append("the model file asks for a start token and names none: prompts begin without one")
    if not end_ids:
        lines.append("the model file names no token that ends an answer: answers end at their limit only")
    elif all(metadata.get(key) is None for key in END_ID_KEYS):
        named = ", ".join(repr(tokens[i]) for i in sorted(end_ids))
        lines.append(f"the model file names no token that ends an answer: it ends at {named}, going by the names")
    if not metadata.get("chat_template"):
        lines.append("the model file has no chat template: chats are refused, plain prompts are not")
    if others := [key.removeprefix("chat_template.") for key in metadata if key.startswith("chat_template.")]:
        lines.append(f"the model file has further chat templates, which are not used: {', '.join(sorted(others))}")
    if metadata.get("ggml.add_eos_token"):
        lines.append("the model file asks for an end token behind prompts: none is put there, as an answer follows")
    return lines


def _check_types(metadata: dict[str, object]) -> None:
    for key, kind in LIST_KEYS.items():
        value = metadata.get(key, [])
        if type(value) is not list or any(type(item) is not kind for item in value):
            raise TokenizerError(f"tokenizer.{key} is not a list of type {kind.__name__}")
    for key, kind in PLAIN_KEYS.items():
        if key in metadata and type(metadata[key]) is not kind:
            raise TokenizerError(f"tokenizer.{key} is not of type {kind.__name__}")


class StreamDecoder:
    """Text of tokens that come one by one, in whole characters: bytes of an unfinished one wait for the next token."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, *, special: bool = False) -> str:
        """The characters that this token completes; a control token ends a character and shows only with `special`."""
        if not self._tokenizer.is_control(token_id):
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        mark = self._tokenizer.token_bytes(token_id).decode() if special else ""
        return self.flush() + mark

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that never became whole, else nothing."""
        return self._utf8.decode(b"", final=True)
