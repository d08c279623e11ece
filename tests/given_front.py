"""An HTTP front on a real socket, over a scripted child, in a thread of the test's process."""

import asyncio
import contextlib
import json
import os
import pathlib
import sys
import threading
import time

import gguf
import httpx

import given_child
import httpfront
from httpfront import Front, FrontOptions, FrontServer
from httpguard import Access
from tokenizer import BYTE_OF, CONTROL, USER_DEFINED

CHILD = str(pathlib.Path(given_child.__file__))
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if open_thinking %}<think>\n{% endif %}{% endif %}"
)
DEADLINE_S = 20.0


def write_tokenizer_model(path, template: str | None = TEMPLATE, *, n_marks: int | None = None, add=None) -> str:
    """A GGUF file with a tokenizer of the 256 bytes and the scripted child's marks, and nothing else.

    ``n_marks``: only the first of these; ``add`` gets the writer for further keys.
    """
    marks = given_child.MARKS[:n_marks]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(BYTE_OF, key=BYTE_OF.get), *marks])
    writer.add_token_types([1] * 256 + [CONTROL] * 3 + [USER_DEFINED] * (len(marks) - 3))
    writer.add_token_merges([])
    writer.add_eos_token_id(given_child.END_ID)
    if template is not None:
        writer.add_chat_template(template)
    if add is not None:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


class Silent:
    """A terminal that only remembers."""

    def __init__(self):
        self.lines: list[str] = []
        self.progress: list = []

    def log(self, line: str) -> None:
        self.lines.append(line)

    def watch(self, progress) -> None:
        self.progress.append(progress and (progress.action, progress.phase, progress.done_bytes, progress.total_bytes))


class RunningFront:
    """A server that has come up, and the folder through which its child is scripted."""

    deadline_s = DEADLINE_S

    def __init__(self, folder: pathlib.Path, model: str, *, command=None, wait=True, **options):
        self.folder = folder
        self.scripts = folder / "scripts"
        self.scripts.mkdir(exist_ok=True)
        access = {name: options.pop(name) for name in list(options) if name in Access.__dataclass_fields__}
        self.limits = options.pop("limits", None)
        self.options = FrontOptions(port=0, model=model, access=Access(**access), **options)
        self.terminal = Silent()
        self._command = command or [sys.executable, "-S", CHILD, str(self.scripts)]
        self._listener = httpfront.listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        key = self.options.access.api_key
        self.client = httpx.Client(
            base_url=self.url, timeout=self.deadline_s, headers={"Authorization": f"Bearer {key}"} if key else None
        )
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._up.wait(self.deadline_s)
        if wait:
            self.wait_for(lambda: self.get("/health").status_code == 200, "health 200")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.front = Front(self.options, self._command, self.terminal)
        self.server = FrontServer(self.front, self.limits)
        starter = asyncio.create_task(self.server.start_front())
        self._up.set()
        await self.server.serve(sockets=[self._listener])
        await asyncio.gather(starter, return_exceptions=True)
        await self.front.close()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.end)
        self._thread.join(self.deadline_s)
        self.client.close()
        assert not self._thread.is_alive(), "the front did not end"
        assert not (self.scripts / "overlap").exists(), "two children at once"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    # Requests.

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body=None, **options) -> httpx.Response:
        return self.client.post(path, json={} if body is None else body, **options)

    def slot(self, action: str, filename=None, **options) -> httpx.Response:
        return self.post(f"/slots/0?action={action}", {} if filename is None else {"filename": filename}, **options)

    def chat(self, text: str = "hi", **fields) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def stream(self, path: str = "/v1/chat/completions", **fields) -> str:
        """The whole text of a streamed answer."""
        body = {"stream": True, **fields}
        if "chat" in path:
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.text

    # The child.

    def script(self, verb: str, *lines: str) -> None:
        """What the child does at the next ``verb``."""
        draft = self.scripts / f"{verb}.draft"
        draft.write_text("\n".join(lines) + "\n")
        os.replace(draft, self.scripts / verb)

    def mark(self, name: str) -> None:
        (self.scripts / name).touch()

    def wait_mark(self, name: str) -> None:
        self.wait_for((self.scripts / name).exists, name)

    def verbs(self) -> list[str]:
        path = self.scripts / "verbs"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self) -> list[int]:
        return [int(line) for line in (self.scripts / "starts").read_text().split()]

    @classmethod
    def wait_for(cls, condition, what: str) -> None:
        """Ask until it holds; a deadline far above any real time ends a test that would hang."""
        deadline = time.monotonic() + cls.deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.005)

    @contextlib.contextmanager
    def meanwhile(self, work):
        """Run ``work`` in a thread beside the block; its result is in the list that is given."""
        results: list = []
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        yield results
        thread.join(self.deadline_s)
        assert not thread.is_alive(), "a request never ended"


def events(text: str) -> list[dict]:
    """The JSON of a stream's events, without the closing mark."""
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def held(front) -> int:
    return front.get("/slots").json()[0]["n_prompt_tokens"]


def refusal(answer, status: int, text: str = "") -> dict:
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]["message"]
    return answer.json()["error"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def slot(front) -> dict:
    return front.get("/slots").json()[0]


def error_of(answer, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == status
    assert isinstance(error["message"], str)
    assert error["type"]
    return error
