"""Limits of the server."""

from __future__ import annotations

from pydantic import Field

from paceline.config import Config


class ServerConfig(Config):
    """Names and limits of one server."""

    model_name: str = "paceline"
    """Name of the model in requests and answers."""
    api_key: str | None = Field(None, min_length=1)
    """Key that requests under `/v1` must carry (`Authorization: Bearer …`). None: no key is needed."""
    max_pending: int = Field(1024, ge=1)
    """Maximum number of answers that wait or are generated. Requests beyond that are refused with status 429."""
    max_answers: int = Field(128, ge=1)
    """Maximum number of answers to one request (`n` times the number of prompts)."""
    max_body_bytes: int = Field(4 << 20, ge=1)
    """Maximum size of a request's body. Larger ones are refused with status 413."""
    warm_up: bool = True
    """Measure step times and capture CUDA graphs while there is no request; otherwise the first requests wait for it."""
    timeout_s: float = Field(600.0, gt=0)
    """Maximum number of seconds for one request, waiting included. After that its answers are dropped, with status 504."""
