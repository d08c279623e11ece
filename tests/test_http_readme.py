"""The commands that the README shows for HTTP, as they stand there."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

from given_front import RunningFront, write_tokenizer_model

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
SECTION = README.split("\n## Over HTTP\n")[1].split("\n## ")[0]
COMMANDS = re.findall(r"^curl .*$", SECTION, re.MULTILINE)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_curl_commands_of_the_readme(tmp_path):
    (tmp_path / "saved").mkdir()
    model = write_tokenizer_model(tmp_path / "tiny.gguf")
    with RunningFront(tmp_path, model, slot_save_path=str(tmp_path / "saved")) as front:

        def run(command: str) -> str:
            command = command.replace("127.0.0.1:8080", f"127.0.0.1:{front.port}").replace("curl ", "curl -sS --fail ")
            return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout

        chat, save, listing, erase, restore, slots, delete = COMMANDS
        assert run(chat).endswith("data: [DONE]\n\n")
        saved = json.loads(run(save))
        assert json.loads(run(listing))["object"] == "list"
        assert json.loads(run(erase))["n_erased"] == saved["n_saved"]
        assert json.loads(run(restore))["n_restored"] == saved["n_saved"] > 0
        assert json.loads(run(slots))[0]["n_prompt_tokens"] == saved["n_saved"]
        # The scripted child's file is none of ours; a mark makes it one that may be removed.
        (tmp_path / "saved" / "chat1.bin").write_bytes(b"STRSESS\x01")
        assert json.loads(run(delete))["filename"] == "chat1.bin"
