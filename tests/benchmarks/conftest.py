"""A stand-in for vLLM: the same calls, steps of 10 ms, no model; and for its server, which takes 50 ms to the first token."""

from __future__ import annotations

from pathlib import Path

import pytest

_PACKAGE = '''
import time
from types import SimpleNamespace

__version__ = "0"


class SamplingParams:
    def __init__(self, max_tokens, **options):
        self.max_tokens = max_tokens


class Engine:
    def __init__(self, max_num_seqs):
        scheduler = SimpleNamespace(max_num_running_reqs=max_num_seqs)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.scheduler, self.left, self.wanted = scheduler, {}, {}

    def add_request(self, request_id, prompt, params):
        self.left[request_id] = self.wanted[request_id] = params.max_tokens

    def step(self):
        time.sleep(0.01)
        running = list(self.left)[: self.scheduler.max_num_running_reqs]
        for request in running:
            self.left[request] -= 1
        done = [SimpleNamespace(request_id=request, finished=self.left[request] == 0,
                                outputs=[SimpleNamespace(token_ids=[0] * self.wanted[request])]) for request in running]
        self.left = {request: left for request, left in self.left.items() if left}
        return done


class LLM:
    def __init__(self, max_num_seqs, **options):
        self.llm_engine = Engine(max_num_seqs)

    def generate(self, prompts, params, use_tqdm):
        for number, each in enumerate(params):
            self.llm_engine.add_request(number, prompts[number], each)
        while self.llm_engine.left:
            self.llm_engine.step()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * each.max_tokens)]) for each in params]
'''

_SERVER = '''
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["stream"]
        self.send_response(200)
        self.end_headers()
        time.sleep(0.05)
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        self.wfile.write(f"data: {usage}\\n\\ndata: [DONE]\\n\\n".encode())


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def vllm_site(tmp_path) -> Path:
    """A folder in which the stand-in is installed."""
    (tmp_path / "site/vllm/entrypoints/openai").mkdir(parents=True)
    (tmp_path / "site/vllm/entrypoints/openai/api_server.py").write_text(_SERVER)
    (tmp_path / "site/vllm/__init__.py").write_text(_PACKAGE)
    return tmp_path / "site"
