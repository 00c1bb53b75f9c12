"""The socket that the server listens on."""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
from contextlib import suppress

from pageloom.config.schema import ServerConfig
from pageloom.errors import PageloomError

log = logging.getLogger(__name__)

SEND_BYTES = 1 << 18  # of an answer, which the kernel keeps for a client that does not read


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket, which does not listen yet: clients are refused until the model is loaded.

    Raises `PageloomError` for an address or a port that cannot be had.
    """
    host, port = config.host, config.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise PageloomError(f"server.host {host} is no address of this machine: {error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        _end_stalled(found, config.stall_seconds)
        found.bind(address)
    except OSError as error:
        found.close()
        raise cannot_listen(config, error) from error
    return found


def cannot_listen(config: ServerConfig, error: OSError) -> PageloomError:
    return PageloomError(
        f"the server cannot listen on {config.host} port {config.port}: {error.strerror}; choose "
        "others with server.host and server.port (port 0 takes any that is free)"
    )


def warn_if_open(host: str, has_keys: bool) -> None:
    """Say so if other machines may come in without a key."""
    if not has_keys and not is_loopback(host):
        log.warning(
            "the server listens on %s without API keys: whoever reaches that address can use it; "
            "set server.api_keys or server.api_key_file, or listen on 127.0.0.1",
            host,
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _end_stalled(listener: socket.socket, seconds: float) -> None:
    """Have the kernel end connections whose other side takes nothing for so long; those that are
    accepted inherit it. Elsewhere than on Linux they stay until the other side closes them."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(seconds * 1000))
        )


def allow_many_files() -> None:
    """Raise the limit of open files, which is often 1024, to what the system lets us have: each
    connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a limit that they do not keep
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
