"""Access to the server: the API key, and what requests without one may do."""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode

from starlette.exceptions import HTTPException
from starlette.requests import Request

from paceline.server.config import ServerConfig


def check_access(request: Request, config: ServerConfig) -> None:
    """Raise HTTPException unless the request has the key, if there is one. Without a key, a server that trainers steer refuses
    what a web page sends: browsers name the page as the origin."""
    if config.api_key is None:
        if config.rl and "origin" in request.headers:
            raise HTTPException(403, "a server with rl and without an API key answers no web pages")
    elif not hmac.compare_digest(_given_key(request).encode(), config.api_key.encode()):
        raise HTTPException(401, "the API key is missing or wrong")


def _given_key(request: Request) -> str:
    """The key of a request: a bearer token, or the password of HTTP basic authentication, which clients that know no keys send
    for an address such as `http://user:KEY@host:8000`."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return value
    try:
        return b64decode(value).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
