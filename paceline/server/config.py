"""Limits of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.config import Config

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Log-probabilities in the plain softmax at temperature 1, or in the distribution that was sampled from."""


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
    rl: bool = False
    """Whether trainers may steer the server: replace weights, pause generation, let the engine sleep (`docs/server.md`)."""
    rl_weights_dir: Path | None = None
    """Folder below which trainers may name folders with weights. None: they may not name any."""
    logprobs_mode: LogprobsMode | None = None
    """Which log-probabilities answers have unless a request says it. None: with `rl` those of the distribution that was sampled
    from, otherwise raw ones."""
    timeout_s: float = Field(600.0, gt=0)
    """Maximum number of seconds for one request, waiting included. After that its answers are dropped, with status 504."""
    template_timeout_s: float = Field(5.0, gt=0)
    """Maximum number of seconds for which a conversation is rendered with the chat template. Longer ones are refused with status
    400."""
    shutdown_s: float = Field(30.0, gt=0)
    """Maximum number of seconds from Ctrl-C or SIGTERM to the end of the process. Requests have five sixths of it to finish; what
    has not finished by then ends with an error."""

    max_connections: int = Field(1024, ge=1)
    """Maximum number of connections. Where the system allows fewer open files, there are fewer."""
    max_idle_connections: int = Field(256, ge=1)
    """Maximum number of connections without a request. Beyond that the one that has been idle for longest is closed."""
    max_head_bytes: int = Field(16 << 10, ge=256)
    """Maximum size of the request line and the headers."""
    head_timeout_s: float = Field(10.0, gt=0)
    """Maximum number of seconds from a request's first byte, or a new connection, to the end of the headers."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Maximum number of seconds for sending the body of a request."""
    idle_timeout_s: float = Field(30.0, gt=0)
    """Number of seconds after an answer for which a connection is kept open without a request."""
    send_timeout_s: float = Field(60.0, gt=0)
    """Maximum number of seconds for which a client may leave its answer unread."""

    @property
    def default_logprobs(self) -> LogprobsMode:
        """Which log-probabilities answers have unless a request says it."""
        return self.logprobs_mode or ("processed_logprobs" if self.rl else "raw_logprobs")
