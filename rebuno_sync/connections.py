"""The requests session that carries kernel calls, and what it knows about proxies and TLS.

Apart from :mod:`.transport` so that ``import rebuno_sync`` does not load requests.
"""

from __future__ import annotations

import dataclasses
import http.client
from collections.abc import Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3 import exceptions as u3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import BaseHTTPResponse
from urllib3.util import Timeout

from .errors import NetworkError
from .slow_peers import PromptResponse

__all__ = ["Timeout", "Way", "find_way", "network_error", "new_session"]

_MAX_KERNELS, _MAX_CONNECTIONS = 256, 128
#: An answer may take so many times as long as its first byte may.
_WHOLE_ANSWER = 4.0


class _WholeAnswer(BaseHTTPResponse):
    """An answer that has been read to its end."""

    length_remaining = 0

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        super().__init__(
            headers=dict(answer.headers.items()),
            status=answer.status,
            version=answer.version,
            version_string="HTTP/1.1",
            reason=answer.reason,
            decode_content=False,
            request_url=None,
        )
        self._data = answer.read()

    @property
    def data(self) -> bytes:
        return self._data

    def drain_conn(self) -> None:
        """Nothing is left to drain."""

    def close(self) -> None:
        """Nothing is left to close; asked for when this is collected."""


class _PromptAnswer(PromptResponse):
    times = _WHOLE_ANSWER


class _WholeRequests(HTTPConnection):
    """Sends head and body in one piece, and reads each answer to its end unless asked not to.

    One system call here and one packet on the way; and none of the machinery for streaming,
    which takes as long as all the rest.
    """

    _held: list[Any] | None = None
    _reads_whole = False

    def request(self, *args: Any, **kwargs: Any) -> None:
        self._reads_whole = kwargs.get("preload_content", True)
        held: list[Any] = []
        self._held = held
        try:
            super().request(*args, **kwargs)
        finally:
            self._held = None
        super().send(b"".join(held))

    def getresponse(self) -> Any:
        if not self._reads_whole or self.sock is None:
            self.response_class = http.client.HTTPResponse
            return super().getresponse()
        self.sock.settimeout(self.timeout)
        self.response_class = _PromptAnswer
        answer = http.client.HTTPConnection.getresponse(self)
        try:
            return _WholeAnswer(answer)
        except BaseException:
            answer.close()  # it holds the socket where the connection is not to be kept
            raise

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)
        else:
            self._held.append(data)


class _WholeRequestsTLS(_WholeRequests, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _WholeRequests


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _WholeRequestsTLS


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}


def new_session() -> requests.Session:
    """Return a session that pools connections and never retries by itself."""
    session = requests.Session()
    adapter = _Adapter(pool_connections=_MAX_KERNELS, pool_maxsize=_MAX_CONNECTIONS, max_retries=0)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


@dataclasses.dataclass(frozen=True)
class Way:
    """How requests to one base URL leave this process.

    Attributes:
        pool: the connections.
        origin: what goes before a target: the origin where an HTTP proxy must be told it.
        proxy_headers: what such a proxy wants to see.
    """

    pool: HTTPConnectionPool
    origin: str
    proxy_headers: Mapping[str, str]


def find_way(session: requests.Session, base_url: str) -> Way:
    """Return the way that ``session`` would take, with the environment's proxies and bundles."""
    settings = session.merge_environment_settings(base_url, {}, False, None, None)
    request = requests.Request("GET", base_url).prepare()
    adapter = session.get_adapter(base_url)
    assert isinstance(adapter, HTTPAdapter)
    verify, proxies, cert = settings["verify"], settings["proxies"], settings["cert"]
    pool = adapter.get_connection_with_tls_context(request, verify, proxies, cert)
    assert isinstance(pool, HTTPConnectionPool)
    adapter.cert_verify(pool, base_url, verify, cert)  # type: ignore[no-untyped-call]
    proxy = select_proxy(base_url, proxies)
    if proxy is None or not adapter.request_url(request, proxies).startswith("http"):
        return Way(pool, "", {})
    scheme, _, rest = base_url.partition("://")
    return Way(pool, f"{scheme}://{rest.partition('/')[0]}", adapter.proxy_headers(proxy))


def network_error(exc: Exception, base_url: str) -> NetworkError | None:
    """Translate what requests and urllib3 raise; ``None`` for what is no failure of theirs."""
    if not isinstance(exc, (u3.HTTPError, requests.RequestException, OSError)):
        return None
    cause = exc.original_error if isinstance(exc, u3.ProxyError) else exc
    never_arrived = isinstance(cause, (u3.NewConnectionError, u3.ConnectTimeoutError))
    what = "could not be reached" if never_arrived else "gave no complete answer"
    # urllib3 puts the connection object before what the system said, which is all that is news.
    why = exc.__cause__ if isinstance(exc, u3.NewConnectionError) and exc.__cause__ else exc
    return NetworkError(f"the kernel at {base_url} {what}: {why}", never_arrived=never_arrived)
