"""A recording client for frameworks that speak asyncio inside and are run synchronously.

The OpenAI Agents SDK and pydantic-ai have synchronous entry points, but take asynchronous
clients only. Their requests are handed to worker threads, where they are sent and recorded by
the client of :func:`rebuno_sync.http_client`; the execution goes along.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

from .llm_clients import http_client

if TYPE_CHECKING:
    import httpx
    import httpx2


@overload
def async_http_client(
    *, library: Literal["httpx2"] | None = None, retries: int = 0, **options: Any
) -> httpx2.AsyncClient: ...


@overload
def async_http_client(
    *, library: Literal["httpx"], retries: int = 0, **options: Any
) -> httpx.AsyncClient: ...


def async_http_client(
    *, library: Literal["httpx2", "httpx"] | None = None, retries: int = 0, **options: Any
) -> Any:
    """Return an asynchronous client that records LLM calls, for ``AsyncOpenAI(http_client=…)``.

    For frameworks that are run from a plain handler by ``run_sync`` or the like. In synchronous
    code :func:`rebuno_sync.http_client` is the shorter way.

    Args:
        library, retries, options: as for :func:`rebuno_sync.http_client`.

    Raises:
        ImportError, ValueError: as :func:`rebuno_sync.http_client`.
    """
    client = http_client(library=library, retries=retries, **options)
    module = _module_of(client)
    return module.AsyncClient(
        transport=_bridge_class(module)(client),
        timeout=client.timeout,
        follow_redirects=client.follow_redirects,
        # The client beneath has taken the proxies of the environment into account.
        trust_env=False,
    )


def _module_of(client: Any) -> Any:
    import sys

    for base in type(client).__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("httpx", "httpx2"):
            return sys.modules[name]
    raise TypeError(f"not a client of httpx or httpx2: {client!r}")


@functools.cache
def _bridge_class(module: Any) -> Any:
    class BridgeTransport(module.AsyncBaseTransport):  # type: ignore[misc]
        """Sends through a synchronous client, on worker threads."""

        def __init__(self, client: Any) -> None:
            self._client = client

        async def handle_async_request(self, request: Any) -> Any:
            sent = module.Request(
                request.method,
                request.url,
                headers=request.headers,
                content=await request.aread(),
                extensions=request.extensions,
            )
            response = await asyncio.to_thread(
                self._client.send, sent, stream=True, auth=None, follow_redirects=False
            )
            return module.Response(
                response.status_code,
                headers=response.headers,
                stream=BridgeStream(response),
                extensions=response.extensions,
            )

        async def aclose(self) -> None:
            await asyncio.to_thread(self._client.close)

    class BridgeStream(module.AsyncByteStream):  # type: ignore[misc]
        """The body of an answer, read on worker threads."""

        def __init__(self, response: Any) -> None:
            self._response = response

        async def __aiter__(self) -> AsyncIterator[bytes]:
            chunks: Iterator[bytes] = self._response.iter_raw()
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                yield chunk

        async def aclose(self) -> None:
            await asyncio.to_thread(self._response.close)

    return BridgeTransport
