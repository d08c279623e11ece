"""A child that speaks the engine's verbs without a model, and breaks the rules when a test tells it to.

Usage: given_child.py FOLDER. It holds a list of token ids, generates bytes of a fixed answer and saves its list as
JSON. A file named after a verb (or START) in FOLDER scripts the answer to the next such verb: each of its lines is
printed, but for directives:

    @default        do what would be done without a script
    @accept         the lines of an accepted request, up to the answer
    @text TEXT      the tokens of TEXT, one line each
    @ids IDS        the same of ids with commas between
    @done           the DONE line
    @mark NAME      create FOLDER/NAME
    @wait NAME      wait until FOLDER/NAME exists
    @wait-stop      wait until STOP comes
    @pause          wait for a moment
    @stderr TEXT    write to stderr
    @raw HEX        write bytes
    @exit N, @die   leave with a status; by SIGKILL
    @deaf           do nothing any more, whatever comes

FOLDER/starts gets a line for each start, FOLDER/overlap is created when two run at once, FOLDER/verbs has every line,
FOLDER/results what was saved.
"""

import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time

N_CTX = 4096
CHUNK = 512
# What the test tokenizer has beside the 256 bytes, in the order of its ids.
MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
END_ID = 256 + MARKS.index("<|im_end|>")
ANSWER = "Grüße from the engine 🙂."


def to_ids(text: str) -> list[int]:
    ids = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        ids += [256 + MARKS.index(mark)] if mark else text[0].encode()
        text = text[len(mark or text[0]) :]
    return ids


class Child:
    def __init__(self, folder: str):
        self.folder = folder
        self.held: list[int] = []
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.stopped = threading.Event()
        self.kept: int | None = None
        self.request = (0, 0, [], 0)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def note(self, name: str, line: str) -> None:
        with open(self.path(name), "a") as file:
            file.write(line + "\n")

    def say(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def read_stdin(self) -> None:
        for line in sys.stdin:
            self.note("verbs", line.rstrip("\n")[:2000])
            if line.startswith("STOP"):
                self.kept = int(line[5:]) if len(line) > 5 else None
                self.stopped.set()
            else:
                self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def run(self) -> int:
        lock = open(self.path("lock"), "w")  # noqa: SIM115 - held as long as the process lives
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.note("overlap", str(os.getpid()))
        self.note("starts", str(os.getpid()))
        threading.Thread(target=self.read_stdin, daemon=True).start()
        self.carry_out("START", "", self.start)
        while (line := self.lines.get()) not in (None, "QUIT"):
            verb, _, rest = line.partition(" ")
            self.stopped.clear()
            self.kept = None
            self.carry_out(verb, rest, getattr(self, verb.lower(), self.unknown))
        return 0

    def carry_out(self, verb: str, rest: str, default) -> None:
        if verb == "GEN":
            self.accept(rest)
        try:
            with open(self.path(verb)) as file:
                script = file.read().splitlines()
            os.unlink(self.path(verb))
        except FileNotFoundError:
            script = ["@default"]
        for line in script:
            word, _, argument = line.partition(" ")
            if line == "@default":
                default(rest)
            elif word.startswith("@"):
                getattr(self, "do_" + word[1:].replace("-", "_"))(argument)
            else:
                self.say(line)

    # Directives.

    def do_accept(self, _) -> None:
        n_reused, _, ids, keys = self.request
        self.say(f"RESUME {n_reused}")
        for position in range(min(n_reused + CHUNK, len(ids)), len(ids) + CHUNK, CHUNK):
            self.say(f"PP {min(position, len(ids))} {len(ids)} 1.5 1000.0")
        self.say(f"REUSED {n_reused}")
        if "source=1" in keys:
            both = zip(self.held, ids, strict=False)
            n_same = next((i for i, (a, b) in enumerate(both) if a != b), min(len(self.held), len(ids)))
            self.say(f"SOURCE {'live' if n_reused else 'none'} {n_reused} {n_same}")

    def do_text(self, text: str) -> None:
        self.emit(to_ids(text))

    def do_ids(self, ids: str) -> None:
        self.emit([int(one) for one in ids.split(",")])

    def emit(self, ids: list[int]) -> None:
        for token_id in ids:
            if self.stopped.is_set() or len(self.answer) >= self.request[1]:
                return
            self.answer.append(token_id)
            self.say(f"T {token_id}")

    def do_done(self, _) -> None:
        n_reused, max_new, ids, _ = self.request
        finish = "stop" if self.answer[-1:] == [END_ID] else "length" if len(self.answer) >= max_new else "stop"
        if self.stopped.is_set() and finish != "length":
            finish = "cancel"
        n_new = len(self.answer)
        self.held = ids + self.answer[: len(self.answer) - 1 if self.kept is None else self.kept]
        self.say(f"DONE {n_new} {len(ids)} 2.5 10.0 {finish} 0 0 {n_reused} 1 2 0 0 0.0 {len(ids) - n_reused} 0")

    def do_mark(self, name: str) -> None:
        self.note(name, "")

    def do_wait(self, name: str) -> None:
        parent = os.getppid()
        while not os.path.exists(self.path(name)):
            if os.getppid() != parent:
                os._exit(1)  # nobody is left who could create it
            time.sleep(0.005)

    def do_wait_stop(self, _) -> None:
        self.stopped.wait()

    def do_pause(self, _) -> None:
        time.sleep(0.02)

    def do_stderr(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def do_raw(self, text: str) -> None:
        sys.stdout.buffer.write(bytes.fromhex(text))
        sys.stdout.buffer.flush()

    def do_exit(self, status: str) -> None:
        os._exit(int(status))

    def do_die(self, _) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_deaf(self, _) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.1)

    # Verbs.

    def start(self, _) -> None:
        self.say(f"INFO context={N_CTX} kv=fp16 kv_resident=0 backend=cpu")
        self.say("INFO model=scripted n_vocab=263 spec=1 conversation_cache_mib=0")
        self.say("INFO model_fp=00000000000000aa config_fp=00000000000000bb engine=0.1")
        self.say(f"READY {N_CTX} stop")

    def accept(self, rest: str) -> None:
        max_new, *keys, ids = rest.split(" ")
        prompt = [int(one) for one in ids.split(",")]
        held = self.held
        n_reused = len(held) if len(held) < len(prompt) and prompt[: len(held)] == held else 0
        self.request = (n_reused, int(max_new), prompt, keys)
        self.answer: list[int] = []

    def gen(self, rest: str) -> None:
        _, max_new, ids, _ = self.request
        if len(ids) + max_new + 8 > N_CTX:
            self.say(f"ERR prompt {len(ids)} + max_new {max_new} + 8 > max_context {N_CTX}")
            return
        self.do_accept("")
        self.emit([*to_ids(ANSWER), END_ID])
        self.do_done("")

    def save(self, path: str) -> None:
        if not self.held:
            self.say("SERR invalid 0 nothing complete is held")
            return
        data = json.dumps(self.held).encode()
        self.say("SWAIT capture 60")
        self.say(f"SESSION 0 {len(data)}")
        with open(path + ".tmp", "wb") as file:
            file.write(data)
        self.say(f"SESSION {len(data)} {len(data)}")
        self.say("SWAIT publish 60")
        os.replace(path + ".tmp", path)
        self.note("results", f"{path} {len(self.held)}")
        self.say(f"SAVED {len(self.held)} {len(data)} 12.5")

    def autosave(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                kept = json.loads(file.read())
        except FileNotFoundError:
            kept = []
        except ValueError:
            kept = [-1]
        if self.held and self.held[: len(kept)] != kept:
            self.say("SERR invalid 0 nothing that is held continues this file")
            return
        self.save(path)

    def restore(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                data = file.read()
            ids = json.loads(data)
        except (OSError, ValueError) as error:
            self.say(f"SERR invalid 0 not a session file: {error}")
            return
        self.say("SWAIT validate 60")
        self.say(f"SESSION {len(data)} {len(data)}")
        self.say("SWAIT transfer 60")
        self.say(f"SESSION {2 * len(data)} {2 * len(data)}")
        self.held = ids
        self.say(f"RESTORED {len(ids)} {len(data)} 3.5")

    def erase(self, _) -> None:
        self.say(f"ERASED {len(self.held)}")
        self.held = []

    def tokens(self, _) -> None:
        self.say(f"TOKENS {len(self.held)} {','.join(map(str, self.held))}".rstrip())

    def stats(self, _) -> None:
        self.say("STATS " + json.dumps({"held": len(self.held)}))

    def unknown(self, rest: str) -> None:
        self.say("ERR expected: GEN, SAVE, RESTORE, ERASE, STATS, STOP or QUIT")


if __name__ == "__main__":
    sys.exit(Child(sys.argv[1]).run())
