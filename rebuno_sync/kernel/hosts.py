"""Which requests a browser may have been tricked into: foreign ``Host`` and ``Origin`` headers.

Any web page can make a browser send requests to a kernel on the same machine. What such a request
cannot hide is where it comes from (``Origin``, ``Sec-Fetch-Site``) and, when the attacker's DNS
name was pointed at this machine, under which name it was asked for (``Host``).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import urlsplit

from flask import Request

from rebuno_sync.kernel import refusals

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Hosts:
    """The names under which a kernel answers.

    Args:
        listens_on: the address that the kernel listens on. Where that stands for every address
            of the machine, so does the one that a connection came in on.
        allowed: further names or addresses, without a port.

    Raises:
        ValueError: an allowed name is no host name.
    """

    def __init__(self, listens_on: str, allowed: Collection[str] = ()) -> None:
        for name in allowed:
            if host_name(f"[{name}]" if ":" in name else name) != name.lower():
                raise ValueError(
                    f"allowed_hosts must be host names without scheme and port, got {name!r:.100}"
                )
        self._everywhere = listens_on in ("", "0.0.0.0", "::")
        own = set() if self._everywhere else {listens_on.lower()}
        self._names = LOOPBACK | own | {name.lower() for name in allowed}

    def check(self, request: Request) -> None:
        """Let a request pass that names a host that this kernel is.

        Raises:
            ForbiddenError: it names another.
        """
        name = host_name(request.headers.get("Host", ""))
        if name in self._names:
            return
        if not self._everywhere or name is None or name != _local_address(request):
            raise refusals.forbidden(
                f"the kernel does not answer under the name {name or 'that was sent'!r:.100};"
                " if it should, start it with that in allowed_hosts"
            )


def host_name(host: str) -> str | None:
    """Return the name in a ``Host`` header in lower case, ``None`` when it is malformed."""
    if not host or not host.isascii() or any(c in host for c in "/?#@\\ \t"):
        return None
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  raises when it is not a number
    except ValueError:
        return None
    return parts.hostname


def check_origin(request: Request) -> None:
    """Let a request pass unless a browser says that another origin's page made it send it.

    A link that a person followed may come from anywhere. Programs that are no browsers say
    nothing, and come from nowhere.

    Raises:
        ForbiddenError: it was another origin's page.
    """
    if _comes_from_elsewhere(request):
        raise refusals.forbidden("a page of another origin made the browser send this")


def _comes_from_elsewhere(request: Request) -> bool:
    site = request.headers.get("Sec-Fetch-Site", "none")
    origin = request.headers.get("Origin")
    if origin is not None and not is_own_origin(request, origin):
        return True
    if site in ("same-origin", "none"):
        return False
    return not (
        request.method in ("GET", "HEAD")
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and request.headers.get("Sec-Fetch-Dest") == "document"
    )


def is_own_origin(request: Request, origin: str) -> bool:
    """Tell whether ``origin`` is where the request goes to.

    The scheme is left out: behind a proxy that ends TLS, the kernel does not know its own.
    """
    scheme, separator, host = origin.partition("://")
    own = request.headers.get("Host", "")
    return scheme in ("http", "https") and bool(separator) and bool(own) and host == own


def _local_address(request: Request) -> str | None:
    connection: Any = request.environ.get("werkzeug.socket")
    if not isinstance(connection, socket.socket):
        return None
    address = ipaddress.ip_address(str(connection.getsockname()[0]).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
