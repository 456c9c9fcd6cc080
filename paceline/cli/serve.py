"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any, NamedTuple

from paceline.cli.log import say
from paceline.engine import Engine
from paceline.extras import install_command
from paceline.garbage import freeze_until_exit

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServeOptions(NamedTuple):
    """The options of `paceline serve`."""

    model: str
    drafter: str
    strategy: str
    dtype: str
    device: str
    threads: int | None
    host: str
    port: int
    engine: dict[str, Any]
    """Fields of `EngineConfig`."""
    server: dict[str, Any]
    """Fields of `ServerConfig`."""


def serve(options: ServeOptions) -> int:
    """Serves until Ctrl-C or SIGTERM; running requests are finished first."""
    try:
        from paceline.server import ServerConfig, create_app
        from paceline.server.run import run_server
    except ImportError as error:
        raise ValueError(f"the package {error.name} is not installed; {install_command('server')}") from None
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    _check_address(options.host, options.port)
    config = ServerConfig(**{"model_name": options.model, **options.server})
    if config.rl and options.host not in _LOOPBACK and config.api_key is None:
        raise ValueError(f"--rl: other machines reach {options.host}, so that --api-key is needed, too")
    if config.rl_weights_dir is not None and not (config.rl and config.rl_weights_dir.is_dir()):
        raise ValueError(f"--rl-weights-dir {config.rl_weights_dir}: " + ("no such folder" if config.rl else "needs --rl"))
    if options.host not in _LOOPBACK and config.api_key is None:
        say(f"{options.host}: anybody who reaches this address can use the server; --api-key restricts it")
    engine = Engine.load(options.model, options.device, options.dtype, options.drafter, options.strategy,
                         **options.engine)
    with ExitStack() as stack:
        freeze_until_exit(stack)
        started = run_server(create_app(engine, config), options.host, options.port,
                             lambda address: say(f"{config.model_name} is served at {address}; Ctrl-C stops"))
    if started:
        say("stopped")
    return 0 if started else 2


def _check_address(host: str, port: int) -> None:
    """Raises a ValueError if nothing can listen there, before a model is loaded for it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None
