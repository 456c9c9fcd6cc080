"""Serves the bundled policy on a free port of this machine, and asks it with the OpenAI client.

    pip install '.[server]' openai
    python examples/deploy/ask_server.py
"""

from __future__ import annotations

import threading
import time

import uvicorn
from openai import OpenAI

from paceline import Engine
from paceline.bundled import resolve_model
from paceline.server import ServerConfig, create_app


def main(max_tokens: int = 64, **engine_options: object) -> list[str]:
    engine = Engine.load(resolve_model("default"), drafter="suffix", **engine_options)
    engine.warm_up()
    app = create_app(engine, ServerConfig(model_name="collatz", max_pending=64))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answers = client.completions.create(model="collatz", prompt=["27:", "97:"], max_tokens=max_tokens, seed=7)
            for prompt, choice in zip(("27:", "97:"), answers.choices, strict=True):
                print(f"{prompt}{choice.text}")
            print("871:", end="")
            for chunk in client.completions.create(model="collatz", prompt="871:", max_tokens=max_tokens, seed=7, stream=True):
                print(chunk.choices[0].text, end="", flush=True)
            print()
    finally:
        server.should_exit = True
        thread.join()
    return [choice.text for choice in answers.choices]


if __name__ == "__main__":
    main()
