"""Time to first token over HTTP: `paceline serve` and vLLM's server in processes of their own, and callers that stream from
them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
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

from benchmarks.lib.queue_parts import POLICY_KV_GB, Bench, first_token_times
from benchmarks.lib.results import ROOT

NAME = "policy"
"""Name under which both servers serve the model."""


def measure_http(bench: Bench, model: str, drafter: Path | None, rounds: int, site: Path | None) -> None:
    """Time to first token of `paceline serve` with `auto` and of vLLM's server, in turns. A server that does not start is named
    with what it said; ours is then measured alone."""
    streams, tiny = bench.sizes.streams, bench.setting.tiny
    options = ("--no-warm-up", "--threads", "1") if tiny else ("--kv-memory-gb", str(POLICY_KV_GB))
    servers = {"paceline": HttpServer.paceline("default" if tiny else model, drafter, streams, site, *options)}
    if site is not None:
        servers["vllm"] = HttpServer.vllm(model or "default", streams, site)
    found: dict[str, Any] = {"streams": streams, "prompts": bench.sizes.stream_prompts}
    try:
        for name, server in servers.items():
            if (why := server.wait(0.5 * bench.budget.left)) is not None:
                found[name] = {"error": why}
        ready = {name: server for name, server in servers.items() if name not in found}
        taken: dict[str, list[list[float]]] = {name: [] for name in ready}
        for number in range(rounds + 1 if "paceline" in ready else 0):  # the first round is a warm-up
            prompts = bench.prompts.take(bench.sizes.stream_prompts)
            if tiny:  # the bundled policy has 14 tokens
                prompts = [[token % 10 for token in prompt] for prompt in prompts]
            lengths = [bench.params.max_new_tokens] * len(prompts)
            for name, server in ready.items():  # vLLM generates as many tokens as Paceline did
                answers = stream(server.port, prompts, lengths, streams, ignore_eos=name == "vllm")
                lengths = [answer.num_tokens for answer in answers]
                taken[name] += [[answer.first_token_s for answer in answers]] if number else []
            if number:
                found |= {name: first_token_times(each, streams) for name, each in taken.items()}
            if number and "vllm" in ready:
                found["paceline"]["ratio_to_vllm"] = found["paceline"]["median_ms"] / found["vllm"]["median_ms"]
            bench.record("http", found)
    except (RuntimeError, OSError) as error:  # a server has ended, or refuses a request
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        for server in servers.values():
            server.close()
    bench.record("http", found)
    print(f"http: {found}", flush=True)


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
        path = os.pathsep.join(map(str, (ROOT, site) if missing and site is not None else (ROOT,)))
        return cls([sys.executable, "-m", "paceline.cli", "serve", "--model", model, "--served-name", NAME, "--port", "{port}",
                    "--drafter", "suffix" if drafter is None else str(drafter), "--max-batch", str(max_batch), *options],
                   {"PYTHONPATH": path})

    @classmethod
    def vllm(cls, model: str, max_batch: int, site: Path) -> HttpServer:
        """vLLM's server with the same weights, from a folder in which vLLM is installed."""
        return cls([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME,
                    "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", "--max-model-len", "4096",
                    "--max-num-seqs", str(max_batch), "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(4 << 30),
                    "--disable-uvicorn-access-log"],
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
        said = " ".join(self._log.read_text(errors="replace").split())[-600:]
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
