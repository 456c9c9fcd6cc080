"""What the benchmarks of speculation on a GPU share: a result file that is whole after every figure, a time budget, real prompts,
the policy (or a tiny random one, so that every script runs from end to end on a CPU in seconds), and vLLM beside us."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import Engine
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.save import hf_config
from paceline.models.weights import load_model

ROOT = Path(__file__).resolve().parent.parent
TINY = ModelConfig("qwen2", 128, 48, 96, 2, 4, 2, 16, qkv_bias=True, tie_embeddings=True, max_context=512)
TINY_TWIN = ModelConfig("qwen2", 128, 80, 128, 2, 12, 4, 16, qkv_bias=True, max_context=512)


def parser_of(doc: str, name: str, minutes: float = 9.0) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random tiny model on the CPU: seconds, figures mean nothing")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin nothing new after so many")
    parser.add_argument("--out", type=Path, default=ROOT / f"benchmarks/results/{name}.json")
    return parser


class Budget:
    def __init__(self, minutes: float) -> None:
        self._began, self._seconds = time.perf_counter(), 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self._seconds - self.used

    @property
    def used(self) -> float:
        return time.perf_counter() - self._began


class Report:
    """The result file. `content` is plain JSON; `save` replaces the file, so what was measured is never lost."""

    def __init__(self, file: Path, device: torch.device, **content: Any) -> None:
        self._file = file
        self.content: dict[str, Any] = {
            "command": command_line(), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(), **content}

    def save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._file.with_suffix(".json.new")
        fresh.write_text(json.dumps(_rounded(self.content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(self._file)


def command_line() -> str:
    """As anyone would type it (`Report` leaves out this machine's folders)."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "transformers", "paceline"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    found["revision"] = git.stdout.strip() or "unknown"
    return found


def _rounded(value: Any) -> Any:
    """Six digits are enough, and no folder of this machine is named."""
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(?<![\w.])/(?:[\w.@+~-]+/)+", "", value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


# --- policies, engines, prompts


class Setting(NamedTuple):
    """Where and with what a script runs."""

    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        if not args.tiny and not torch.cuda.is_available():
            raise SystemExit("no CUDA device here; --tiny runs the script on a CPU")
        if args.tiny:
            torch.set_num_threads(1)
        return cls(torch.device("cpu" if args.tiny else "cuda"), args.tiny)

    def policy(self, source: str | Path | None) -> tuple[Decoder, Any]:
        """(model in bfloat16, tokenizer or None)."""
        if self.tiny:
            return Decoder.random(TINY, std=0.3), None
        if source is None:
            raise SystemExit("--model is missing: a folder or GGUF file")
        return load_model(source, self.device, torch.bfloat16)

    def engine(self, model: Decoder, drafter: Eagle | None, max_batch: int, kv_gb: float = 20.0, strategy: Any = "off",
               **options: Any) -> Engine:
        if self.tiny:
            options |= {"kernels": "torch", "max_context": 400}
            kv_gb = 0.05
        return Engine(model, None, drafter, strategy, EngineConfig(max_batch=max_batch, kv_memory_gb=kv_gb, **options))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def questions(file: Path | None) -> list[str]:
    """Of a file with one JSON object a line and `question` in it; none: numbered dummies (a tiny model reads no text)."""
    if file is None:
        return [f"question {i}" for i in range(64)]
    return [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def chat(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Each as one user's message."""
    if tokenizer is None:
        return [[(len(text) * 7 + 31 * i + j * j) % TINY.vocab_size for j in range(6)] for i, text in enumerate(texts)]
    return [list(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
                                               return_dict=False)) for text in texts]


def random_prompts(count: int, length: int, vocabulary: int, salt: int) -> list[list[int]]:
    """No two begin alike: no prefix cache helps."""
    draw = random.Random(salt)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


# --- vLLM


SHAPES = {
    "0.5B": ModelConfig("qwen2", 152064, 896, 4864, 24, 14, 2, 64, qkv_bias=True, tie_embeddings=True, max_context=4096),
    "1.5B": ModelConfig("qwen2", 152064, 1536, 8960, 28, 12, 2, 128, qkv_bias=True, tie_embeddings=True, max_context=4096),
    "7B": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True, max_context=4096),
}
"""Qwen2.5's."""


class Vllm:
    """vLLM on random weights of one of the shapes, in a process of its own (its speed does not depend on them)."""

    def __init__(self, socket: Path, process: subprocess.Popen[bytes] | None, log: Path | None = None) -> None:
        self._socket, self._process, self._log = socket, process, log
        self._connection: Connection | None = None

    @classmethod
    def start(cls, site: Path, shape: str, folder: Path, max_context: int = 4096, max_batch: int = 256,
              kv_gb: float | None = None) -> Vllm:
        """site: a folder with vLLM in it; folder: for the socket."""
        model = folder.resolve() / f"{shape}-model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(hf_config(SHAPES[shape], torch.bfloat16)))
        socket, log = folder.resolve() / shape, folder.resolve() / f"{shape}.log"
        socket.unlink(missing_ok=True)
        settings = {"folder": str(model), "socket": str(socket), "max_context": max_context, "max_batch": max_batch,
                    "kv_gb": kv_gb or (11.0 if shape == "7B" else 4.0)}
        environment = os.environ | {"PYTHONPATH": str(site), "VLLM_USE_FLASHINFER_SAMPLER": "0",
                                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, str(ROOT / "benchmarks/peer_vllm_gpu.py"), json.dumps(settings)],
                                       env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output)
        return cls(socket, process, log)

    @classmethod
    def of(cls, args: argparse.Namespace, shape: str) -> Vllm | None:
        """As `--vllm-at` or `--vllm-path` say; None: neither does."""
        if args.vllm_at is not None:
            return cls(args.vllm_at.resolve() / shape, None)
        return None if args.vllm_path is None else cls.start(args.vllm_path, shape, Path(tempfile.mkdtemp()))

    @property
    def is_alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def wait(self, timeout: float) -> dict[str, Any]:
        """Until it is ready for us (it serves one at a time): {"version": …, "start_seconds": …}, or {"error": …}."""
        until = time.perf_counter() + timeout
        while time.perf_counter() < until and self.is_alive:
            try:
                self._connection = Client(str(self._socket))
            except OSError:
                time.sleep(0.5)
                continue
            if self._connection.poll(max(0.0, until - time.perf_counter())):
                return self._connection.recv()
        said = self._log.read_text(errors="replace")[-1500:] if self._log is not None else ""
        return {"error": f"not there after {timeout:.0f} s {said}"}

    def seconds(self, prompts: list[list[int]], new_tokens: Sequence[int]) -> float:
        """Of generating so many tokens behind each prompt."""
        assert self._connection is not None, "wait for it first"
        self._connection.send((prompts, list(new_tokens)))
        return self._connection.recv()["seconds"]

    def hang_up(self) -> None:
        """The next one may ask."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Leaves a peer that others started where it is."""
        self.hang_up()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-path", type=Path, help="a folder with vLLM in it: start it for this run")
    parser.add_argument("--vllm-at", type=Path, help="the folder of gpu_peers.py, which has started it already")
