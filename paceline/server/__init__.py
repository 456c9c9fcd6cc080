"""An OpenAI-compatible HTTP server for a policy and its drafter: `pip install '.[server]'`.

`create_app` makes the application; `paceline serve` runs it with uvicorn."""

from paceline.server.app import create_app
from paceline.server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
