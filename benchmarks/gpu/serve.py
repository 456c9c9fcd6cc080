"""Time to first token over HTTP, `paceline serve` against vLLM's server in the same run.

    python benchmarks/gpu/serve.py --model FOLDER --prompts gsm8k_train.jsonl --drafter build/drafter --vllm-path SITE

Each server runs in a process of its own. 64 callers stream completions of at most `--new-tokens` tokens from one of them, each of
whom sends the next prompt when its last answer is complete; then from the other one. Prompts are grade-school problems of about
100 tokens, each with a number at its beginning, so that no prefix cache helps. The first 64 prompts arrive at once; those that
follow arrive among running requests, and theirs is the time that counts. vLLM (random weights of the same shape) generates as
many tokens for each prompt as Paceline did.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.figures import Goal
from benchmarks.lib.prompts import questions
from benchmarks.lib.queue_parts import POLICY_KV_GB, Prompts
from benchmarks.lib.result_tables import print_result
from benchmarks.lib.results import ROOT, Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from paceline.models.save import hf_config

NAME = "policy"
"""Name under which both servers serve the model."""
RATIO = 0.8
"""The goal: largest time to first token as a multiple of vLLM's."""


def main() -> None:
    args = parse()
    setting, budget = Setting.of(args), Budget(args.minutes)
    policy, tokenizer = setting.policy(args.model)
    config, prompts = hf_config(policy.config, torch.bfloat16), Prompts(tokenizer, questions(args.prompts))
    del policy
    servers = start_servers(args, config, tokenizer)
    report = Report(args, setting.device, streams=args.streams, new_tokens=args.new_tokens, servers={}, goals=[])
    try:
        measure(args, servers, prompts, report, budget)
    finally:
        for server in servers.values():
            server.close()
        report.save()
    print_result(report.content)


def parse() -> Any:
    parser = make_parser(__doc__, "gpu/serve", 4.0)
    parser.add_argument("--model", help="the policy: a folder or GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a question each")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter (default: the suffix drafter)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm-path", type=Path, help="a folder in which vLLM is installed")
    args = parser.parse_args()
    if not args.tiny and (args.model is None or args.prompts is None):
        parser.error("--model and --prompts are needed, unless the run is --tiny")
    if args.tiny:
        args.streams, args.new_tokens, args.rounds = 2, 4, 1
    return args


def start_servers(args: Any, config: dict[str, Any], tokenizer: Any) -> dict[str, HttpServer]:
    options = ("--no-warm-up", "--threads", "1") if args.tiny else ("--kv-memory-gb", str(POLICY_KV_GB))
    servers = {"paceline": HttpServer.paceline("default" if args.tiny else args.model, args.drafter, args.streams,
                                               args.vllm_path, *options)}
    if args.vllm_path is not None:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        servers["vllm"] = HttpServer.vllm(folder, args.streams, args.vllm_path)
    return servers


def measure(args: Any, servers: dict[str, HttpServer], prompts: Prompts, report: Report, budget: Budget) -> None:
    """Rounds in which the servers take turns, after one to warm up. A server that does not start is named with what it said."""
    found = report.content["servers"]
    for name, server in servers.items():
        if (why := server.wait(0.5 * budget.left)) is not None:
            found[name] = {"error": why}
            report.save()
    ready = {name: server for name, server in servers.items() if name not in found}
    taken: dict[str, list[list[float]]] = {name: [] for name in ready}
    for number in range(args.rounds + 1 if "paceline" in ready else 0):
        if number > 1 and budget.left < 20:
            break
        asked = prompts.take(4 * args.streams)
        if args.tiny:  # the bundled policy has few tokens
            asked = [[token % 10 for token in prompt] for prompt in asked]
        lengths = [args.new_tokens] * len(asked)
        for name, server in ready.items():  # Paceline first: vLLM generates as many tokens
            answers = stream(server.port, asked, lengths, args.streams, ignore_eos=name == "vllm")
            lengths = [answer.num_tokens for answer in answers]
            taken[name] += [[answer.first_token_s for answer in answers]] if number else []
        if number:
            found |= {name: first_token_times(each, args.streams) for name, each in taken.items()}
            report.save()
    if "median_ms" in found.get("vllm", {}):
        ratio = found["paceline"]["median_ms"] / found["vllm"]["median_ms"]
        report.content["goals"] = [Goal("time to first token: × vLLM", ratio, RATIO, at_least=False).record()]


def first_token_times(rounds: Sequence[Sequence[float]], streams: int) -> dict[str, float]:
    """Milliseconds of the prompts that arrived among running requests, and of those that arrived at once."""
    at_once = [1e3 * waited for each in rounds for waited in each[:streams]]
    later = sorted(1e3 * waited for each in rounds for waited in each[streams:])
    return {"median_ms": statistics.median(later), "p95_ms": later[int(0.95 * (len(later) - 1))],
            "at_once_median_ms": statistics.median(at_once)}


class HttpServer:
    """A server process with the OpenAI API on a free port of this machine."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """`{port}` in the command stands for the port."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        self._log = Path(tempfile.mkdtemp()) / "log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen([part.replace("{port}", str(self.port)) for part in command],
                                             env=os.environ | environment, stdout=output, stderr=output)

    @classmethod
    def paceline(cls, model: str, drafter: Path | None, max_batch: int, site: Path | None, *options: str) -> HttpServer:
        """`paceline serve` with `auto`. `site`: where Starlette and uvicorn are if this interpreter does not have them."""
        missing = any(find_spec(name) is None for name in ("starlette", "uvicorn"))
        path = os.pathsep.join([str(ROOT), *([str(site)] if missing and site is not None else []), *sys.path])
        return cls([sys.executable, "-m", "paceline.cli", "serve", "--model", model, "--served-name", NAME, "--port", "{port}",
                    "--drafter", "suffix" if drafter is None else str(drafter), "--max-batch", str(max_batch), *options],
                   {"PYTHONPATH": path})

    @classmethod
    def vllm(cls, folder: Path, max_batch: int, site: Path) -> HttpServer:
        """vLLM's server, from a folder in which vLLM is installed, with random weights for the config in `folder`."""
        return cls([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name",
                    NAME, "--load-format", "dummy", "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16",
                    "--max-model-len", "4096", "--max-num-seqs", str(max_batch), "--gpu-memory-utilization", "0.1",
                    "--kv-cache-memory-bytes", str(4 << 30), "--disable-uvicorn-access-log"],
                   {"PYTHONPATH": str(site), "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})

    def wait(self, timeout: float) -> str | None:
        """Waits until the server is there and warm. Returns why it is not, or None."""
        until = time.perf_counter() + timeout
        while time.perf_counter() < until and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    body = answer.read()
                if not body or json.loads(body).get("warm", True):  # vLLM's answer is empty
                    return None
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        state = "is not ready" if self._process.poll() is None else f"has ended with status {self._process.poll()}"
        said = " ".join(self._log.read_text(errors="replace").split())[-900:]
        return f"the server {state} after {timeout - (until - time.perf_counter()):.0f} s: …{said}"

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Streamed(NamedTuple):
    """One streamed answer."""

    first_token_s: float
    """Seconds from sending the request until the first event."""
    num_tokens: int


def stream(port: int, prompts: Sequence[list[int]], new_tokens: Sequence[int], streams: int,
           ignore_eos: bool = False) -> list[Streamed]:
    """Streams an answer of at most `new_tokens[i]` tokens to prompt i, with so many callers, each of whom sends the next prompt
    when its last answer is complete."""
    found: dict[int, Streamed] = {}
    waiting = iter(range(len(prompts)))

    async def caller() -> None:
        for number in waiting:
            body = {"model": NAME, "prompt": prompts[number], "max_tokens": new_tokens[number], "temperature": 1.0,
                    "ignore_eos": ignore_eos, "stream": True, "stream_options": {"include_usage": True}}
            found[number] = await _stream_one(port, json.dumps(body).encode())

    async def callers() -> None:
        await asyncio.gather(*(caller() for _ in range(streams)))

    asyncio.run(callers())
    return [found[number] for number in range(len(prompts))]


async def _stream_one(port: int, body: bytes) -> Streamed:
    """Only the first event is looked for; what follows is read in large pieces, so that the callers cost little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                     b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        first, seen = 0.0, b""
        while piece := await reader.read(1 << 16):
            seen = (seen + piece) if not first else (seen + piece)[-4096:]
            if not first and b"data: {" in seen:
                first = time.perf_counter() - began
    finally:
        writer.close()
    counts = re.findall(rb'"completion_tokens": ?(\d+)', seen)
    if not first or b"data: [DONE]" not in seen or not counts:
        raise RuntimeError(f"the stream is incomplete: {seen[:600]!r}")
    return Streamed(first, int(counts[-1]))


if __name__ == "__main__":
    main()
