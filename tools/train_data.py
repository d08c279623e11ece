"""The text the demo model learns from: verses, running text, conversations made of verses, and the tokenizer.

Owns where the text comes from, the split into training and held-out chapters, and the shape of a conversation. Knows
nothing of models. Invariant: no held-out verse reaches training text, training conversations or the tokenizer. Next:
train_model.py.

Source: the King James text of Debian's `bible-kjv` (package `bible-kjv-text`), printed by its `bible` command. The
translation of 1611 is in the public domain, but for Crown letters patent inside the United Kingdom.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

N_VERSES = 31102
HELD_OUT_EVERY = 20  # every twentieth chapter is never trained on
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, TURN_START, TURN_END = SPECIALS
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# The split of the qwen35 pre-tokenizer, so that a reader of `tokenizer.ggml.pre` finds what was trained.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of the text, under the names of common use.
BOOKS = (  # noqa: SIM905  (a column of quoted names is no easier to read)
    "Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings 2_Kings 1_Chronicles "
    "2_Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes Song_of_Solomon Isaiah Jeremiah Lamentations "
    "Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark "
    "Luke John Acts Romans 1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians "
    "2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude "
    "Revelation"
).split()


class Verse(NamedTuple):
    book: str
    chapter: int
    number: int
    text: str

    @property
    def reference(self) -> str:
        return f"{self.book} {self.chapter}:{self.number}"


def read_verses(command: str = "bible") -> list[Verse]:
    whole = [command, "-f", "ge1:1-re22:21"]
    printed = subprocess.run(whole, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    verses, books, last = [], iter(BOOKS), None
    for line in printed.stdout.decode("ascii").splitlines():
        short, chapter, number, text = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line).groups()
        if short != last:
            last, book = short, next(books).replace("_", " ")
        verses.append(Verse(book, int(chapter), int(number), " ".join(text.split())))
    if len(verses) != N_VERSES:
        raise SystemExit(f"{command!r} printed {len(verses)} verses, expected {N_VERSES}: is this Debian's bible-kjv?")
    return verses


def chapters(verses: list[Verse]) -> list[list[Verse]]:
    groups: dict[tuple[str, int], list[Verse]] = {}
    for verse in verses:
        groups.setdefault((verse.book, verse.chapter), []).append(verse)
    return list(groups.values())


def split_chapters(verses: list[Verse]) -> tuple[list[list[Verse]], list[list[Verse]]]:
    """Training and held-out chapters."""
    groups = chapters(verses)
    held = HELD_OUT_EVERY // 2
    train = [c for i, c in enumerate(groups) if i % HELD_OUT_EVERY != held]
    return train, [c for i, c in enumerate(groups) if i % HELD_OUT_EVERY == held]


def running_text(groups: list[list[Verse]]) -> Iterator[str]:
    """One string a book: each chapter under its heading, a verse a line."""
    book, parts = groups[0][0].book, []
    for group in groups:
        if group[0].book != book:
            yield "\n".join(parts) + END_OF_TEXT
            book, parts = group[0].book, []
        parts.append(f"{book} {group[0].chapter}\n" + "\n".join(v.text for v in group) + "\n")
    yield "\n".join(parts) + END_OF_TEXT


# --- conversations ---------------------------------------------------------------------------------------------------

STOP_WORDS = (  # noqa: SIM905
    "that with them they which from shall thou unto were have said this their upon thee into there when will people "
    "also came come before your after because then went made every even against what would over being neither saying "
    "among thine these those where whom more than like therefore other hath doth hast"
).split()
ASK_TOPIC = (
    "Tell me of {}.", "What is written of {}?", "Speak to me of {}.", "What does the Bible say about {}?", "{}",
    "Tell me about {}.", "A verse about {}, please.", "What is said of {}?", "Write about {}.", "Who or what is {}?",
    "tell me about {}",
)  # fmt: skip
ASK_ANY = (
    "Hello", "Hello!", "Hi", "Good morning.", "Tell me a story.", "Tell me something.", "Who are you?", "How are you?",
    "Read to me.", "Read me a verse.", "Write something.", "What is the meaning of life?", "Can you help me?", "Why?",
    "Tell me a story about a king.", "What should I do?", "Give me counsel.", "What happened then?", "hello there",
    "test",
)  # fmt: skip
ASK_MORE = (
    "Go on.", "Continue.", "And then?", "What came next?", "Read on.", "More.", "continue", "go on", "Please continue.",
)  # fmt: skip
ASK_ECHO = ("Repeat after me: {}", "Say: {}", "Write this: {}", "Repeat: {}", "Say after me: {}")
ASK_FIRST = ("What did I say first?", "Repeat my first words.", "What was the first thing that I told thee?")
ASK_NAME = ("What is my name?", "Who am I?", "Dost thou know my name?", "Say my name.", "what's my name?")
TELL_NAME = ("My name is {}.", "I am {}.", "I am called {}.", "My name is {}. Remember it.", "Hello, my name is {}.")
TELL_WORD = ("Remember this word: {}.", "Keep this word for me: {}.", "The word is {}.", "Remember the word {}.")
ASK_WORD = ("What was the word?", "Which word did I tell thee to keep?", "What is the word?", "Say the word.")
SYSTEMS = (
    "You are a helpful assistant.", "Answer from the scriptures.", "Thou art a scribe.", "You are a kind assistant.",
)  # fmt: skip
NAMES = (  # noqa: SIM905
    "Abel Abigail Abner Adam Alice Amos Andrew Anna Asher Barnabas Benjamin Boaz Caleb Clara Dan Daniel David Deborah "
    "Dinah Eli Elijah Elisha Emma Enoch Esther Eve Ezra Felix Gad Gideon Hannah Henry Hosea Isaac Isaiah Jacob James "
    "Jane Jared Jeremiah Jesse Joanna Job Joel John Jonah Jonathan Joseph Joshua Judith Laban Leah Levi Lois Lot Luke "
    "Lydia Maria Mark Martha Mary Matthew Micah Michael Miriam Moses Naomi Nathan Noah Obed Paul Peter Philip Phebe "
    "Rachel Rebekah Reuben Robert Ruth Samson Samuel Sarah Saul Seth Silas Simeon Simon Solomon Stephen Susanna "
    "Tabitha Thomas Timothy Titus Tom Uriah William Zadok"
).split()


def turn(role: str, text: str) -> str:
    return f"{TURN_START}{role}\n{text}{TURN_END}\n"


class Scribe:
    """Writes conversations whose answers are verses of `groups`; the same seed writes the same ones."""

    def __init__(self, groups: list[list[Verse]], seed: int) -> None:
        self.groups = groups
        self.rng = random.Random(seed)
        self.by_word: dict[str, list[tuple[int, int]]] = {}
        for i, group in enumerate(groups):
            for j, verse in enumerate(group):
                for word in set(re.findall(r"[A-Za-z]{4,}", verse.text)) - set(STOP_WORDS):
                    self.by_word.setdefault(word, []).append((i, j))
        self.words = sorted(word for word, places in self.by_word.items() if len(places) >= 4)

    def conversation(self, n_turns: int) -> str:
        """One conversation; what the user asked to be kept is asked for again later in it."""
        self._forget()
        text = turn("system", self.rng.choice(SYSTEMS)) if self.rng.random() < 0.25 else ""
        for number in range(n_turns):
            text += self._exchange(self.rng.choice(self._kinds(first=number == 0)))
        return text + END_OF_TEXT

    def drill(self, n_turns: int) -> str:
        """A conversation of short exchanges that need what was said before: the quickest way to learn to look back."""
        self._forget()
        text = ""
        for _ in range(n_turns):
            kinds = [self._echo, self._echo, self._shuffled, self._shuffled, self._tell]
            text += self._exchange(self.rng.choice(kinds + ([self._recall] * 4 if self.kept else [])))
        return text + END_OF_TEXT

    def memory_test(self, n_between: int) -> tuple[str, str]:
        """A conversation up to the answer that needs something told `n_between` turns before, and that answer."""
        self._forget()
        text = self._exchange(self._tell)
        for _ in range(n_between):
            text += self._exchange(self.rng.choice((self._topic, self._reference, self._half, self._next, self._any)))
        asked, wanted = self._recall()
        return text + turn("user", asked) + f"{TURN_START}assistant\n", wanted

    def _forget(self) -> None:
        self.place, self.first, self.kept = None, None, {}

    def _kinds(self, first: bool) -> list[Callable[[], tuple[str, str]]]:
        """The exchanges that make sense next, each as often as it should be drawn."""
        kinds = [self._topic, self._reference, self._half, self._next, self._any, self._tell, self._echo]
        kinds += [self._recall] * 4 if self.kept else []
        kinds += [self._go_on] * 3 if self.place else []
        return kinds if first else [*kinds, self._again]

    def _exchange(self, kind: Callable[[], tuple[str, str]]) -> str:
        user, answer = kind()
        self.first = self.first or user
        return turn("user", user) + turn("assistant", answer)

    def _pick(self, place: tuple[int, int] | None = None, most: int = 2) -> str:
        """One or more verses from `place` on, which becomes the place to go on from."""
        i, j = place or self._random_place()
        verses = self.groups[i][j : j + self.rng.randint(1, most)]
        self.place = (i, j + len(verses)) if j + len(verses) < len(self.groups[i]) else None
        return " ".join(v.text for v in verses)

    def _random_place(self) -> tuple[int, int]:
        i = self.rng.randrange(len(self.groups))
        return i, self.rng.randrange(len(self.groups[i]))

    def _topic(self) -> tuple[str, str]:
        word = self.rng.choice(self.words)
        place = self.rng.choice(self.by_word[word])
        asked = word if self.rng.random() < 0.8 else word.lower()
        return self.rng.choice(ASK_TOPIC).format(asked), self._pick(place)

    def _reference(self) -> tuple[str, str]:
        i, j = self._random_place()
        ask = self.rng.choice(("{}", "Read {}.", "What is written in {}?", "{}, please."))
        return ask.format(self.groups[i][j].reference), self._pick((i, j))

    def _half(self) -> tuple[str, str]:
        """The user begins a verse, the answer ends it."""
        i, j = self._random_place()
        words = self.groups[i][j].text.split()
        cut = self.rng.randint(min(3, len(words) - 1), len(words) - 1)
        rest = self._pick((i, j), most=1).split()[cut:]
        return " ".join(words[:cut]), " ".join(rest)

    def _next(self) -> tuple[str, str]:
        i, j = self._random_place()
        j = max(0, min(j, len(self.groups[i]) - 2))
        return self.groups[i][j].text, self._pick((i, min(j + 1, len(self.groups[i]) - 1)))

    def _any(self) -> tuple[str, str]:
        return self.rng.choice(ASK_ANY), self._pick(most=3)

    def _go_on(self) -> tuple[str, str]:
        return self.rng.choice(ASK_MORE), self._pick(self.place, most=3)

    def _echo(self) -> tuple[str, str]:
        words = self._pick(most=1).split()
        start, self.place = self.rng.randrange(max(1, len(words) - 3)), None
        phrase = " ".join(words[start : start + self.rng.randint(1, 8)])
        return self.rng.choice(ASK_ECHO).format(phrase), phrase

    def _shuffled(self) -> tuple[str, str]:
        """Words in an order that no sentence has: only looking back can tell what follows."""
        phrase = " ".join(self.rng.choices(self.words, k=self.rng.randint(1, 8)))
        return self.rng.choice(ASK_ECHO).format(phrase), phrase

    def _again(self) -> tuple[str, str]:
        return self.rng.choice(ASK_FIRST), self.first

    def _tell(self) -> tuple[str, str]:
        if self.rng.random() < 0.5:
            name = self.kept["name"] = self.rng.choice(NAMES)
            return self.rng.choice(TELL_NAME).format(name), f"Peace be unto thee, {name}."
        word = self.kept["word"] = self.rng.choice(self.words).lower()
        return self.rng.choice(TELL_WORD).format(word), "I will keep it in my heart."

    def _recall(self) -> tuple[str, str]:
        what = self.rng.choice(sorted(self.kept))
        if what == "name":
            return self.rng.choice(ASK_NAME), f"Thy name is {self.kept['name']}."
        return self.rng.choice(ASK_WORD), f"The word is {self.kept['word']}."


# --- tokenizer -------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE of `n_vocab` tokens, the special ones last."""
    tokenizer = _dressed(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def tokenizer_of(tokens: list[str], merges: list[str]) -> Tokenizer:
    """The tokenizer that a GGUF's `tokenizer.ggml.tokens` and `.merges` describe."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _dressed(models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges]))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def _dressed(bpe: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_keys(tokenizer: Tokenizer, merges: list[tuple[str, str]]) -> dict[str, object]:
    """The `tokenizer.*` keys of a GGUF, without that prefix."""
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return {
        "ggml.model": "gpt2", "ggml.pre": "qwen35", "ggml.tokens": tokens,
        "ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "ggml.merges": [" ".join(pair) for pair in merges],
        "ggml.eos_token_id": tokenizer.token_to_id(TURN_END),
        "ggml.padding_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "ggml.add_bos_token": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
