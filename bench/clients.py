"""A day of a chat front end: how much of each prompt was sent, could be reused, was reused and was read.

Two chats in turn with one system prompt, a title and a tags request behind each answer, an answer given anew, a message
edited, a request given up in the middle, the oldest exchange left out, and a date that changes over night. What could
be reused is the longest common start of a prompt's text with anything that was answered before, counted in tokens. The
models: the one named, a hybrid of random weights with the embedded model's vocabulary, and the embedded model.

Usage: clients.py --model PATH [--each]
"""

import argparse
import os
import sys
import tempfile
from typing import NamedTuple

import gguf
import httpx
import numpy as np
from frontserver import REQUEST_S, ROOT, serving
from ggufcopy import write_copy
from machine import machine_facts

sys.path.insert(0, str(ROOT))

from modelfile import embedded_model

GOAL = 0.95
SYSTEM = (
    "You are a patient assistant who answers in a few plain sentences. Say so when you do not know something, name your"
    " sources where you have any, never invent a number, and ask when a question can be read in two ways. Units are"
    " metric, dates are written as year, month and day, and code is shown in full. Today is {date}."
)
TASK = (
    "### Task:\nGenerate {what} for the chat below. Answer with JSON alone, without any comment.\n"
    "### Guidelines:\n- Use the language of the chat.\n- Be short and exact, and leave out what is said in passing.\n"
    "### Chat:\n<chat_history>\n{chat}\n</chat_history>"
)
SUBJECTS = {
    "garden": ("How do I keep slugs away from my lettuce without poison?", "And in a wet summer?", "What about copper?",
               "Which of these helps against snails as well?", "Thank you. What should I plant next to it?"),
    "travel": ("Plan three quiet days in Lisbon for two people who like to walk.", "We arrive late on the first day.",
               "Is the tram worth it?", "Where do we find a good view at sunset?", "And what if it rains?"),
}  # fmt: skip


class Row(NamedTuple):
    """One request in tokens."""

    what: str
    sent: int
    could: int
    reused: int


def _common_start(one: str, other: str) -> int:
    """Characters that two texts have in common from their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class Day:
    """One server and what was asked of it."""

    def __init__(self, client: httpx.Client):
        self.client, self.rows, self.date = client, [], "2026-03-01"
        self.answered: list[str] = []  # prompts with their answers, as text
        self.chats: dict[str, list[dict]] = {name: [] for name in SUBJECTS}

    def post(self, path: str, body: dict) -> dict:
        answer = self.client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def n_tokens(self, text: str) -> int:
        return len(self.post("/tokenize", {"content": text})["tokens"])

    def ask(self, what: str, messages: list[dict], n_new: int) -> str:
        """The answer to some messages, and the row about them."""
        prompt = self.post("/apply-template", {"messages": messages})["prompt"]
        could = max((_common_start(prompt, text) for text in self.answered), default=0)
        body = {"messages": messages, "max_tokens": n_new, "seed": len(self.rows)}
        answer = self.post("/v1/chat/completions", body)
        usage, text = answer["usage"], answer["choices"][0]["message"]["content"]
        most = min(self.n_tokens(prompt[:could]), usage["prompt_tokens"] - 1) if could else 0
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        self.rows.append(Row(what, usage["prompt_tokens"], most, reused))
        self.answered.append(prompt + text)
        return text

    def messages(self, name: str) -> list[dict]:
        return [{"role": "system", "content": SYSTEM.format(date=self.date)}, *self.chats[name]]

    def answer(self, name: str, what: str = "turn") -> None:
        """The next answer of a chat, then its title and its tags."""
        text = self.ask(f"{name}: {what}", self.messages(name), 80)
        self.chats[name].append({"role": "assistant", "content": text})
        lines = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in self.chats[name])
        for aim in ("a concise title of three to five words", "one to three broad tags"):
            task = [{"role": "user", "content": TASK.format(what=aim, chat=lines)}]
            self.ask(f"{name}: {aim.split()[-1]}", task, 24)

    def say(self, name: str, number: int) -> None:
        self.chats[name].append({"role": "user", "content": SUBJECTS[name][number]})

    def give_up(self, name: str) -> None:
        """A streamed answer whose reader goes away after its first events."""
        body = {"messages": self.messages(name), "stream": True, "seed": 7}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == 6:
                    break

    def run(self) -> None:
        for number in (0, 1, 2):
            for name in SUBJECTS:
                self.say(name, number)
                self.answer(name)
        self.chats["garden"].pop()
        self.answer("garden", "given anew")
        self.chats["travel"][-2:] = [{"role": "user", "content": "Is the old tram up the hill worth the wait?"}]
        self.answer("travel", "edited")
        self.say("garden", 3)
        self.give_up("garden")
        self.answer("garden", "asked again")
        del self.chats["garden"][:2]
        self.say("garden", 4)
        self.answer("garden", "oldest left out")
        self.date = "2026-03-02"
        for name in SUBJECTS:
            self.say(name, 3)
            self.answer(name, "another date")
            self.say(name, 4)
            self.answer(name)


def write_hybrid(path: str) -> str:
    """The small qwen35 of the tests with the embedded model's vocabulary: random weights, and texts as any model's."""
    small = gguf.GGUFReader(ROOT / "tests" / "data" / "model" / "qwen35.gguf")
    words = gguf.GGUFReader(embedded_model())
    n_vocab, chance = len(words.fields["tokenizer.ggml.tokens"].data), np.random.default_rng(0)
    tensors = {
        tensor.name: chance.normal(0, 0.3, (n_vocab, int(tensor.shape[0]))).astype(np.float32)
        for tensor in small.tensors
        if tensor.name in ("token_embd.weight", "output.weight")
    }
    return write_copy(path, small, {"qwen35.vocab_size": n_vocab}, tensors, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model with attention alone")
    parser.add_argument("--each", action="store_true", help="print every request")
    args = parser.parse_args()
    print("machine: " + ", ".join(f"{name} {value}" for name, value in machine_facts().items()))
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        hybrid = write_hybrid(os.path.join(folder, "hybrid.gguf"))
        for kind, model in (("attention alone", args.model), ("hybrid", hybrid), ("embedded model", embedded_model())):
            with serving(model) as address, httpx.Client(base_url=address, timeout=REQUEST_S) as client:
                day = Day(client)
                day.run()
            could, reused = sum(row.could for row in day.rows), sum(min(row.reused, row.could) for row in day.rows)
            for row in day.rows if args.each else ():
                print(f"  {row.what:24} sent {row.sent:5}, could be reused {row.could:5}, reused {row.reused:5}")
            sent, read = sum(row.sent for row in day.rows), sum(row.sent - row.reused for row in day.rows)
            print(f"{kind}: {len(day.rows)} requests, sent {sent} tokens, reused {sent - read}, read {read}")
            print(f"{kind}, reused of what could be: {100 * reused / could:.1f} %")
            missed |= reused < GOAL * could
    sys.exit(f"less than {100 * GOAL:.0f} % was reused" if missed else 0)


if __name__ == "__main__":
    main()
