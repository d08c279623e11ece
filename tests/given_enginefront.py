"""The HTTP front over the real engine and a tiny model."""

import os
import pathlib
import random
import signal
import sys

from given_front import RunningFront

ROOT = pathlib.Path(__file__).parent.parent
MODEL = str(ROOT / "tests" / "data" / "model" / "llama.gguf")
QUICK = ("--session-min-free-mib=0", "--conversation-cache-min-free-mib=0", "--threads=1", "--prompt-cache-root=64")
N_NEW = 16


class EngineFront(RunningFront):
    """A front over the engine, with saved sessions in a folder of their own, and a store if asked for."""

    # The first answers after a change of the kernels wait for the compiler.
    deadline_s = 600.0

    def __init__(
        self, folder: pathlib.Path, *flags: str, saved: pathlib.Path | None = None, model: str = MODEL, store=None
    ):
        self.saved = saved or folder / "saved"
        self.saved.mkdir(exist_ok=True, mode=0o700)
        engine = [f"--model={model}", f"--slot-save-path={self.saved}", *QUICK, *flags]
        engine += [f"--store={store}"] if store else []
        command = [sys.executable, str(ROOT / "strata.py"), "--serve", *engine]
        super().__init__(folder, model, command=command, slot_save_path=str(self.saved), store=store and str(store))

    def turn(self, ids: list[int], n_new: int = N_NEW, **fields) -> dict:
        """A greedy answer to token ids."""
        answer = self.post("/completion", {"prompt": ids, "n_predict": n_new, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def save(self, name: str) -> dict:
        return self._succeed("save", name)

    def restore(self, name: str) -> dict:
        return self._succeed("restore", name)

    def _succeed(self, action: str, name: str) -> dict:
        answer = self.slot(action, name)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def kill_engine(self) -> None:
        os.kill(self.front.child.pid, signal.SIGKILL)
        self.wait_for(lambda: self.get("/slots").json()[0]["model"] == "unloaded", "its end")

    def restart_engine(self) -> None:
        self.kill_engine()
        assert self.post("/load").status_code == 200

    def held(self) -> int:
        return self.get("/slots").json()[0]["n_prompt_tokens"]


def some_ids(n_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(17, 273), k=n_tokens)


def conversation(front, n_tokens: int = 300, seed: int = 0) -> tuple[list[int], int]:
    """Hold a new conversation; its next prompt, and how many tokens of it are held."""
    ids = some_ids(n_tokens, seed)
    answer = front.turn(ids)
    assert len(answer["tokens"]) == N_NEW, "the tiny model ended its answer early: choose another seed"
    return ids + answer["tokens"] + some_ids(20, seed + 1), n_tokens + N_NEW - 1


def refused(answer, status: int, kind: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.get("kind") == kind
    return error["message"]
