"""Errors of requests, as the OpenAI API reports them: a status and a body of one line."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.engine.thread import Overloaded, Unavailable

_CLIENT_GONE = 499
"""Status, seen in metrics only, of a request whose client did not wait for the answer."""
_RETRY_AFTER_S = 1
_MAX_CHARS = 300
"""Longest part of a message that a client may have written."""
_CODES = {401: "invalid_api_key", 404: "not_found", 408: "request_timeout", 413: "request_too_large", 429: "rate_limit_exceeded",
          500: "server_error", 503: "service_unavailable", 504: "timeout"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_NAME = re.compile(r"\w{1,100}")
_FIELD = re.compile(r"([a-z_]\w*(?:\.\w+)*): ")


class GenerationFailed(Exception):
    """The engine ended an answer with an error."""


class NoTokenAllowed(GenerationFailed):
    """The parameters of a request forbid every token that could follow. That shows only while its answer is generated."""


ANSWERED = (ValueError, HTTPException, Overloaded, Unavailable, TimeoutError, GenerationFailed, ClientDisconnect)
"""Errors that a client is told about. Any other one is a defect of the server."""


def error_response(error: Exception) -> Response:
    """The answer to a request that raised one of `ANSWERED`."""
    status, message = describe(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}  # such as the methods that a path has
    if status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    return Response(error_json(status, message), status, headers, "application/json")


def error_json(status: int, message: str) -> bytes:
    """The body of an error. A message that begins with the name of a field and a colon names that field as `param`."""
    found = _FIELD.match(message)
    code = "context_length_exceeded" if "leave no room" in message else _CODES.get(status, "invalid_value")
    if status == 404 and message.startswith("the model "):
        code = "model_not_found"
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = found[1].split(".")[0] if found and status == 400 else None
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}, ensure_ascii=False).encode()


def describe(error: Exception) -> tuple[int, str]:
    """Status and message of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail
    if isinstance(error, ClientDisconnect):
        return _CLIENT_GONE, "the client is gone"
    if isinstance(error, TimeoutError):
        return 504, "the answer took longer than the server's time limit"
    status = {Overloaded: 429, Unavailable: 503, GenerationFailed: 500, NoTokenAllowed: 400}.get(type(error), 400)
    return status, _one_line(_first_of(error) if isinstance(error, ValidationError) else str(error))


def _first_of(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(part for part in map(str, first["loc"]) if _NAME.fullmatch(part))  # others name alternatives of a type
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where and not message.startswith(f"{where}:") else message


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " …"
