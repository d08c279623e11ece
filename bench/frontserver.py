"""`strata --serve --http` as a child on a port of its own, as a user starts it, for benches that speak HTTP.

Read next: clients.py and strain.py, which ask it.
"""

import contextlib
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx

ROOT = pathlib.Path(__file__).resolve().parent.parent
START_S, REQUEST_S, END_S, POLL_S = 600, 600, 60, 0.05  # a first start compiles kernels


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """The address of a server with the defaults; ends this process with the server's last words where it does."""
    with tempfile.TemporaryFile() as log, started(model, log, *options) as process:
        try:
            yield address_of(process, log)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def started(model: str, log, *options: str) -> subprocess.Popen:
    """The process; `log` takes what it says, by which `address_of` finds it."""
    command = [sys.executable, str(ROOT / "strata.py"), "--serve", "--http=127.0.0.1:0", f"--model={model}", *options]
    return subprocess.Popen(command, stderr=log)


def address_of(process: subprocess.Popen, log) -> str:
    """Where the server listens, once it is ready."""
    address, end = None, time.monotonic() + START_S
    while address is None or httpx.get(f"{address}/health").status_code != 200:
        log.seek(0)
        text = log.read().decode(errors="replace")
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"the server did not start: {text[-500:]}")
        if found := re.search(r"listening on (http://\S+)", text):
            address = found[1]
        time.sleep(POLL_S)
    return address
