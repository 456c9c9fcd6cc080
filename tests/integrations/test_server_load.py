"""`paceline serve` under mixed load: every answer comes, memory stays where it was, and SIGTERM ends it in an orderly way.

The suffix drafter's history is a cache that fills. It is bounded to a few MiB here and filled before memory is measured, so
whatever grows after that is a leak.

PACELINE_LOAD_SECONDS sets how long (600)."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import httpx
import openai
import psutil
import pytest

pytestmark = pytest.mark.integration
SECONDS = float(os.environ.get("PACELINE_LOAD_SECONDS", "600"))
NUM_CLIENTS = 12
HISTORY_BYTES = 2 << 20
ALLOWED_GROWTH = 8 << 20
"""Bytes that resident memory may grow by: allocators keep what they get back from large steps."""


@pytest.fixture
def server(tmp_path):
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "paceline.cli", "serve", "--model", "default", "--port", "0",
                                "--max-pending", "24", "--max-batch", "16", "--suffix-memory-gb", str(HISTORY_BYTES / 2**30)],
                               stderr=log, stdout=log)
    end = time.monotonic() + 120
    while not (found := re.search(r"served at (http://\S+);", (tmp_path / "log").read_text())):
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.2)
    yield process, found[1], tmp_path / "log"
    process.kill()
    process.wait()


async def one_request(client: openai.AsyncOpenAI, rng: random.Random, seen: Counter[str]) -> None:
    """A completion, a stream, a stream that is given up, a request that is given up, or a wrong one."""
    kind = rng.choice(["whole", "whole", "stream", "stream", "leave", "time out", "wrong"])
    asked = {"model": "default", "prompt": f"{rng.randrange(10, 400)}:", "max_tokens": rng.choice([8, 40, 200]),
             "n": rng.choice([1, 1, 3]), "logprobs": rng.choice([None, 1])}
    try:
        if kind == "whole":
            answer = await client.completions.create(**asked, stop=rng.choice([None, "16"]))
            assert len(answer.choices) == asked["n"]
        elif kind == "wrong":
            await client.completions.create(**{**asked, "temperature": -1})
        elif kind == "time out":
            await client.with_options(timeout=0.2).completions.create(**asked)
        else:
            async with await client.completions.create(**asked, stream=True) as stream:
                async for _ in stream:
                    if kind == "leave" and rng.random() < 0.2:
                        break
        seen[kind] += 1
    except openai.RateLimitError:
        seen["overload"] += 1
        await asyncio.sleep(0.2)
    except openai.BadRequestError:
        seen["refused"] += 1
    except openai.APITimeoutError:
        seen["timed out"] += 1


async def load(address: str, process: psutil.Process, seconds: float) -> tuple[Counter[str], list[int], list[int]]:
    """Many clients at once. Returns what they saw, and the server's memory and its history's size over time."""
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds
    memory: list[int] = []
    history: list[int] = []

    async def client_loop(number: int) -> None:
        rng = random.Random(number)
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=120) as client:
            while time.monotonic() < end:
                await one_request(client, rng, seen)

    async def watch() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while time.monotonic() < end:
                metrics = (await client.get(f"{address.removesuffix('/v1')}/metrics")).text
                history.append(int(float(re.search(r"^paceline_suffix_history_bytes (.*)$", metrics, re.MULTILINE)[1])))
                memory.append(process.memory_info().rss)
                await asyncio.sleep(1)

    await asyncio.gather(watch(), *map(client_loop, range(NUM_CLIENTS)))
    return seen, memory, history


def test_mixed_load_leaves_nothing_behind(server):
    process, address, log = server
    seen, memory, history = asyncio.run(load(address, psutil.Process(process.pid), SECONDS))
    for name, values in (("memory", memory), ("history", history)):
        print(name, [round(bytes_ / 2**20, 1) for bytes_ in values[:: max(1, len(values) // 20)]])
    print(dict(seen))
    assert seen["whole"] and seen["stream"] and seen["leave"] and seen["overload"] and seen["refused"] and seen["timed out"]
    assert max(history) <= HISTORY_BYTES
    full = next(i for i, size in enumerate(history) if size > 0.9 * HISTORY_BYTES)
    assert full < len(history) / 3, "the history filled too late to tell a leak from it"
    memory = memory[full:]
    early, late = (sorted(part)[len(part) // 2] for part in (memory[: len(memory) // 5], memory[-len(memory) // 5 :]))
    assert late < early + ALLOWED_GROWTH, f"{early / 2**20:.1f} MiB became {late / 2**20:.1f} MiB"

    base = address.removesuffix("/v1")
    end = time.monotonic() + 20
    while "paceline_pending_answers 0.0" not in (metrics := httpx.get(f"{base}/metrics").text):
        assert time.monotonic() < end, metrics
        time.sleep(0.1)
    assert "paceline_running_requests 0.0" in metrics and "paceline_kv_cache_usage 0.0" in metrics
    assert httpx.get(f"{base}/health").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 0
    assert "Traceback" not in log.read_text() and log.read_text().rstrip().endswith("stopped")
