"""Text to token ids and back, and messages to the text a model was trained on.

It owns the way from a GGUF file's tokenizer metadata to the `tokenizers` library, and chat rendering with `jinja2`; it
knows nothing of models, sessions or protocols. Invariant: decoding the ids of a text gives that text (in its NFC form
where the model asks for it). Read next: gguffile.py, which opens the file.
"""

import codecs
import datetime
import json
from collections.abc import Iterable
from functools import cached_property

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from gguffile import GgufError, end_token_ids, open_gguf, sampling_metadata, tokenizer_metadata

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
ID_KEYS = ("ggml.bos_token_id", "ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")
PLAIN_KEYS = {"ggml.pre": str, "chat_template": str, "ggml.add_bos_token": bool} | dict.fromkeys(ID_KEYS, int)

# Token types of the GGUF specification. Normal tokens are spelled in the byte alphabet, the others in plain text.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4


class TokenizerError(Exception):
    """A tokenizer, a text, an id or a chat template that cannot be used; one line."""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, as introduced with GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Tokenizer:
    """The tokenizer of one model file."""

    def __init__(self, metadata: dict[str, object]):
        """Take a file's `tokenizer.*` metadata, keys without that prefix; raises TokenizerError."""
        _check_types(metadata)
        self._tokens: list[str] = metadata["ggml.tokens"]
        self._types: list[int] = metadata.get("ggml.token_type") or [1] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise TokenizerError(f"{len(self._tokens)} tokens, but {len(self._types)} token types")
        pre = metadata.get("ggml.pre", "default")
        self.n_vocab = len(self._tokens)
        self.chat_template: str | None = metadata.get("chat_template")
        self.bos_id, self.eos_id = (self._known_id(metadata, key) for key in ("bos_token_id", "eos_token_id"))
        self.add_bos = bool(metadata.get("ggml.add_bos_token", pre in LLAMA3_FAMILIES)) and self.bos_id is not None
        self.end_ids = end_token_ids(metadata)
        self._control = frozenset(i for i, kind in enumerate(self._types) if kind in (UNKNOWN, CONTROL))
        self._missing = frozenset(BYTE_OF[char] for char in BYTE_OF.keys() - set(self._tokens))
        self._plain, self._marked = self._library_pair(metadata.get("ggml.merges") or [], pre)
        # What the file says below `general.sampling.`: how its model is to be sampled, for whoever answers with it.
        self.sampling: dict[str, object] = {}

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
            tokenizer = cls(metadata)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error
        tokenizer.sampling = sampling
        return tokenizer

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """The token ids of a text.

        With `special`, control tokens spelled out in the text become their ids, as rendered messages need it; else they
        are text like any other. With `bos`, the start token comes first where the model asks for it and none is there.
        """
        library = self._marked if special else self._plain
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text that is not Unicode: a lone surrogate at character {error.start}") from error
        if self._missing and (lacking := self._missing.intersection(raw)):
            raise TokenizerError(f"the vocabulary has no token for the byte {min(lacking):#04x} of this text")
        ids = library.encode(text, add_special_tokens=False).ids
        if bos and self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

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
        try:
            token_id = self._marked.token_to_id(text)
        except UnicodeEncodeError:  # a lone surrogate, which no token has
            return None
        return token_id if token_id is not None and self._types[token_id] in (CONTROL, USER_DEFINED) else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they may be a part of a character."""
        token = self._tokens[token_id]
        if self._types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED):
            return token.encode()
        try:
            return bytes([BYTE_OF[char] for char in token])
        except KeyError:  # a padding token outside the byte alphabet
            return token.encode()

    def render_chat(self, messages: list[dict], *, tools=None, add_generation_prompt=True, **variables) -> str:
        """Messages as the text that the model's chat template makes of them; `variables` are further names in it."""
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        marks = {name: self._tokens[token_id] for name, token_id in names.items() if token_id is not None}
        known = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(marks | variables | known)
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program of its own and fails in its own ways
            raise TokenizerError(f"the model's chat template refused these messages: {error}") from error

    def encode_chat(self, messages: list[dict], *, tools=None, add_generation_prompt=True, **variables) -> list[int]:
        """The token ids of messages through the model's chat template."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, special=True, bos=True)

    def _known_id(self, metadata: dict[str, object], key: str) -> int | None:
        token_id = metadata.get(f"ggml.{key}")
        if token_id is not None and not 0 <= token_id < len(self._tokens):
            raise TokenizerError(f"{key} is {token_id}, outside the vocabulary of {len(self._tokens)}")
        return token_id

    def _library_pair(self, merges: list[str], pre: str) -> tuple[LibraryTokenizer, LibraryTokenizer]:
        """Two tokenizers over one model: control tokens are text to the first and ids to the second."""
        if pre not in PRE_TOKENIZERS:
            raise TokenizerError(f"pre-tokenizer {pre!r} is not supported; known are {', '.join(PRE_TOKENIZERS)}")
        model = self._library_model(merges, ignore_merges=pre in LLAMA3_FAMILIES)
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pair = LibraryTokenizer(model), LibraryTokenizer(model)
        for library in pair:
            if pre in NFC_FAMILIES:
                library.normalizer = normalizers.NFC()
            library.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
            library.add_tokens([self._added(i) for i, kind in enumerate(self._types) if kind == USER_DEFINED])
        pair[1].add_special_tokens([self._added(token_id) for token_id in sorted(self._control)])
        return pair

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

    def _added(self, token_id: int) -> AddedToken:
        return AddedToken(self._tokens[token_id], normalized=False, special=token_id in self._control)

    @cached_property
    def _template(self) -> jinja2.Template:
        if not self.chat_template:
            raise TokenizerError("the model has no chat template: give it plain text")
        try:
            return _chat_environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the model's chat template cannot be compiled: {error}") from error


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

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that never became whole, else nothing."""
        return self._utf8.decode(b"", final=True)


# --- Chat templates: the names and settings they are written against ---


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """A sandbox, since a template is a program that came with a model file."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as it is: jinja2's own filter escapes it for HTML pages, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise TokenizerError(f"the model's chat template refused these messages: {message}")
