"""vLLM beside Paceline on one GPU: a client, and a program that keeps vLLM running for several benchmarks.

    python benchmarks/lib/vllm_gpu.py SITE build/peers 7B 1.5B 0.5B &     # SITE: a folder in which vLLM is installed
    python benchmarks/gpu/decode.py --vllm-at build/peers

Each shape's process holds its GPU memory meanwhile; it computes only when a benchmark asks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.models import DECODE_SHAPES
from paceline.models.save import hf_config


class Vllm:
    """vLLM with random weights of one of `DECODE_SHAPES` in a process of its own (its speed does not depend on the weights)."""

    def __init__(self, socket: Path, process: subprocess.Popen[bytes] | None, log: Path | None = None) -> None:
        self._socket, self._process, self._log = socket, process, log
        self._connection: Connection | None = None

    @classmethod
    def start(cls, site: Path, shape: str, folder: Path, max_context: int = 4096, max_batch: int = 256,
              kv_gb: float | None = None) -> Vllm:
        """Starts vLLM from `site`, a folder in which it is installed. `folder` is for socket, log and the model's config."""
        model = folder.resolve() / f"{shape}-model"
        model.mkdir(parents=True, exist_ok=True)
        config = replace(DECODE_SHAPES[shape], max_context=max_context)  # vLLM refuses a context beyond the model's
        (model / "config.json").write_text(json.dumps(hf_config(config, torch.bfloat16)))
        socket, log = folder.resolve() / shape, folder.resolve() / f"{shape}.log"
        socket.unlink(missing_ok=True)
        settings = {"folder": str(model), "socket": str(socket), "max_context": max_context, "max_batch": max_batch,
                    "kv_gb": kv_gb or (11.0 if shape == "7B" else 4.0)}
        environment = os.environ | {"PYTHONPATH": str(site), "VLLM_USE_FLASHINFER_SAMPLER": "0",
                                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        with log.open("wb") as output:
            server = str(Path(__file__).with_name("vllm_gpu_server.py"))
            process = subprocess.Popen([sys.executable, server, json.dumps(settings)],
                                       env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output)
        return cls(socket, process, log)

    @classmethod
    def of(cls, args: argparse.Namespace, shape: str, **options: Any) -> Vllm | None:
        """The peer that `--vllm-at` or `--vllm-path` names; None if neither is given. `options`: of `start`, if it is started
        here."""
        if args.vllm_at is not None:
            return cls(args.vllm_at.resolve() / shape, None)
        site = getattr(args, "vllm_path", None)
        return None if site is None else cls.start(site, shape, Path(tempfile.mkdtemp()), **options)

    @property
    def is_alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def wait(self, timeout: float) -> dict[str, Any]:
        """Waits until the peer serves this process (it serves one client at a time). Returns {"version": …, "start_seconds": …},
        or {"error": …} after `timeout` seconds."""
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

    def seconds(self, prompts: list[list[int]], new_tokens: Sequence[int], timeout: float = 600,
                max_batch: int | None = None) -> float:
        """Seconds that vLLM takes to generate `new_tokens[i]` tokens for prompt i, at most `max_batch` prompts at a time (its
        max_num_seqs; None: as many as it was started for)."""
        return self._ask({"prompts": prompts, "new_tokens": list(new_tokens), "max_batch": max_batch}, timeout)["seconds"]

    def episodes(self, jobs: Sequence[dict[str, Any]], live: int, timeout: float = 600) -> float:
        """Seconds that vLLM takes for episodes (`lib.episodes.Drawn.as_job`), of which `live` are under way at once."""
        return self._ask({"episodes": list(jobs), "live": live}, timeout)["seconds"]

    def _ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._connection is not None, "call wait() first"
        self._connection.send(job)
        if not self._connection.poll(timeout):
            raise TimeoutError(f"vLLM: no answer after {timeout:.0f} s")
        return self._connection.recv()

    def measure(self, prompts: list[list[int]], new_tokens: Sequence[int], warm: list[list[int]], warm_tokens: Sequence[int],
                timeout: float) -> dict[str, Any]:
        """What `wait` returns, and the seconds of a rollout after a warm-up with other prompts. Disconnects afterwards."""
        found = self.wait(timeout)
        try:
            if "error" not in found:
                self.seconds(warm, warm_tokens)
                found["seconds"] = [self.seconds(prompts, new_tokens)]
        except (EOFError, OSError) as error:  # it has ended, or does not answer
            found["error"] = f"{type(error).__name__}: {error}"
        finally:
            self.hang_up()
        return found

    def hang_up(self) -> None:
        """Disconnects, so that another client may connect."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Disconnects, and ends the process if this object started it."""
        self.hang_up()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def add_vllm_arguments(parser: argparse.ArgumentParser, can_start: bool = True) -> None:
    """Adds the arguments that `Vllm.of` reads. can_start: Whether the benchmark may start vLLM itself."""
    if can_start:
        parser.add_argument("--vllm-path", type=Path, help="a folder in which vLLM is installed: start it for this run")
    parser.add_argument("--vllm-at", type=Path, help="folder of a running benchmarks/lib/vllm_gpu.py, which has started vLLM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="a folder in which vLLM is installed")
    parser.add_argument("folder", type=Path, help="folder for sockets and logs")
    parser.add_argument("shapes", nargs="+", choices=list(DECODE_SHAPES))
    parser.add_argument("--max-context", type=int, default=4096, help="longest prompt and response together")
    parser.add_argument("--kv-gb", type=float, help="memory for the KV cache of each shape (default: by shape)")
    args = parser.parse_args()
    peers = {name: Vllm.start(args.site, name, args.folder, args.max_context, kv_gb=args.kv_gb) for name in args.shapes}
    for name, peer in peers.items():
        print(name, peer.wait(1200), flush=True)
        peer.hang_up()
    while all(peer.is_alive for peer in peers.values()):
        time.sleep(1)


if __name__ == "__main__":
    main()
