"""A server in this process, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import tiny
from e2e.toy import make_folder
from transformers import PreTrainedTokenizerFast

from paceline import Engine
from paceline.config import EngineConfig
from paceline.server import ServerConfig, create_app
from paceline.server.run import LimitedServer

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}A"


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter, and a chat template."""
    make_folder(folder)
    found = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    found.chat_template = TEMPLATE
    return found


def make_engine(tokens: Any, strategy: str = "suffix:d4w2v8") -> Engine:
    return Engine(tiny.model("llama"), tokens, "suffix", strategy, EngineConfig(kv_tokens=8192, max_batch=16, profile=False))


class RunningServer:
    """Serves an engine on a free port until the end of the `with` block."""

    def __init__(self, engine: Engine, step_s: float = 0.0, **config: Any) -> None:
        """`step_s`: seconds that every step takes longer. It may be changed later."""
        self.engine, self.step_s = engine, step_s
        self.config = ServerConfig(**{"model_name": "tiny", "warm_up": False, "shutdown_s": 120, **config})
        self.app = app = create_app(engine, self.config)
        self.thread, self.control = app.state.thread, app.state.server.control
        self.server = LimitedServer(app, "127.0.0.1", 0)
        self._serving = threading.Thread(target=self.server.run)
        if step_s:
            step = engine.step
            engine.step = lambda: (time.sleep(self.step_s), step())[1]

    def __enter__(self) -> RunningServer:
        self._serving.start()
        wait_until(lambda: self.server.started)
        self.address = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=self.config.api_key or "none", max_retries=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()

    def stop(self) -> None:
        self.server.should_exit = True
        self._serving.join(120)
        assert not self._serving.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left."""
        engine = self.engine
        return (self.thread.num_pending == 0 and not engine.has_work and not engine.planner.requests and not self.thread._requests
                and engine.scheduler.pages.num_held == 0)


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
