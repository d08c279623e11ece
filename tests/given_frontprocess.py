"""The HTTP front as a process of its own, over the scripted child."""

import json
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading

import httpx

import httpfront
from given_front import CHILD, DEADLINE_S, RunningFront, write_tokenizer_model

MAIN = """
import json, sys
sys.path.insert(0, {root!r})
import httpfront
import httproutes
{before}
options = json.loads(sys.argv[1])
try:
    sys.exit(httpfront.serve(httpfront.FrontOptions(port=0, **options), sys.argv[2:]))
except httpfront.FrontError as error:
    sys.exit(f"strata: {{error}}")
"""


class Process:
    """A front as a process of its own, over the scripted child."""

    def __init__(self, folder: pathlib.Path, *, before: str = "", descriptors: int | None = None, **options):
        """``before`` is code that runs in the process ahead of the front."""
        self.folder, self.scripts, self.saved = folder, folder / "scripts", folder / "saved"
        for path in (self.scripts, self.saved):
            path.mkdir(exist_ok=True)
        model = folder / "tiny.gguf"
        if not model.exists():
            write_tokenizer_model(model)
        options = {"model": str(model), "slot_save_path": str(self.saved), **options}
        main = MAIN.format(root=str(pathlib.Path(httpfront.__file__).parent), before=before)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        less = (descriptors or limits[0], limits[1])
        self.process = subprocess.Popen(
            [sys.executable, "-c", main, json.dumps(options), sys.executable, "-S", CHILD, str(self.scripts)],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, less),  # noqa: PLW1509 - no thread before it
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        RunningFront.wait_for(lambda: self.port or self.process.poll() is not None, "the port")
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)

    script, mark, wait_mark, verbs, pids = (
        RunningFront.script,
        RunningFront.mark,
        RunningFront.wait_mark,
        RunningFront.verbs,
        RunningFront.pids,
    )
    wait_for, deadline_s = RunningFront.wait_for, DEADLINE_S
    meanwhile = RunningFront.meanwhile

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int | None:
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log)
        return int(found[1]) if found else None

    def wait_ready(self) -> "Process":
        self.wait_for(lambda: self.client.get("/health").status_code == 200, "health")
        return self

    def chat(self, text: str = "hi", **fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def slot(self, action: str, name: str) -> httpx.Response:
        return self.client.post(f"/slots/0?action={action}", json={"filename": name})

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    def close(self) -> None:
        """End what a failed test left, and hold that no child survived."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()
        self.client.close()
        if (self.scripts / "starts").exists():
            for pid in self.pids():
                self.wait_for(lambda pid=pid: not running(pid), "the child to end")
        assert not (self.scripts / "overlap").exists()


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
