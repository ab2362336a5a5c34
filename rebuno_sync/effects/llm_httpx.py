"""LLM calls made with httpx or httpx2: the transports that record them (PROTOCOL 11).

The two libraries have one interface under two names. ``HTTPX2Transport`` and ``HTTPXTransport``
are made when they are first asked for, so that only the one that is used must be installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from ..context import execution_or_none
from ..errors import safe_text
from .llm import IDEMPOTENCY_KEY, Answer, Body, Failed, Failure, Incoming, call_of
from .llm_call import check_retries, perform

_LIBRARIES = ("httpx2", "httpx")
#: The provider libraries that decide which one is needed.
_PROVIDERS = ("openai", "anthropic")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class RecordingTransport:
    """What both transports do; see :class:`HTTPX2Transport`."""

    library: ClassVar[Any]
    _stream_class: ClassVar[Any]

    def __init__(self, inner: Any = None, *, retries: int = 0) -> None:
        if isinstance(inner, RecordingTransport):
            raise ValueError("the inner transport records already; each call would be two steps")
        self._inner = self.library.HTTPTransport() if inner is None else inner
        self._retries = check_retries(retries)

    def handle_request(self, request: Any) -> Any:
        """Send a request, or answer it from its record."""
        context = execution_or_none()
        call = None
        if context is not None and self._may_be_json(request):
            call = call_of(request.read(), request.url.path, request.headers)
        if context is None or call is None:
            return self._inner.handle_request(request)
        exchange = _Exchange(self.library, self._inner, request)
        try:
            answer = perform(context, call, exchange, self._retries)
        except Failed as failed:
            raise exchange.error(failed.failure) from None
        return self._response(answer, exchange)

    def _response(self, answer: Answer, exchange: _Exchange) -> Any:
        return self.library.Response(
            answer.status,
            headers=list(answer.headers.items()),
            stream=self._stream_class(answer.body, exchange),
        )

    def _may_be_json(self, request: Any) -> bool:
        """Tell whether the body can be looked at; an upload is not read into memory for that."""
        return (
            isinstance(request.stream, self.library.ByteStream)
            or "json" in request.headers.get("content-type", "").lower()
        )

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def __enter__(self) -> Any:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(exc_type, exc_value, traceback)


class _Exchange:
    """One request as a transport sends it."""

    def __init__(self, library: Any, inner: Any, request: Any) -> None:
        self._library = library
        self._inner = inner
        self._request = request

    def send(self, step_id: str) -> Incoming:
        # What the caller holds stays as it was, so that it looks the same after a replay.
        given = self._request
        request = self._library.Request(
            given.method,
            given.url,
            headers=given.headers,
            stream=given.stream,
            extensions=given.extensions,
        )
        request.headers.setdefault(IDEMPOTENCY_KEY, step_id)
        response = self._inner.handle_request(request)
        response.request = request
        return Incoming(
            response.status_code, response.headers, response.iter_bytes(), response.close
        )

    def failure(self, exc: Exception) -> Failure:
        # A class of the user's own is recorded as the one of the library that it derives from.
        ours = vars(self._library)
        names = (c.__name__ for c in type(exc).__mro__ if ours.get(c.__name__) is c)
        return Failure(next(names, type(exc).__name__), safe_text(exc))

    def is_transient(self, exc: Exception) -> bool:
        library = self._library
        return isinstance(
            exc,
            (
                library.TimeoutException,
                library.NetworkError,
                library.RemoteProtocolError,
                library.ProxyError,
            ),
        )

    def error(self, failure: Failure) -> Exception:
        """Return the error of the library that a recorded failure stands for."""
        base = self._library.RequestError
        found = getattr(self._library, failure.type, None)
        if not (isinstance(found, type) and issubclass(found, base)):
            found = self._library.TransportError
            if failure.type:
                failure = Failure("", f"{failure.type}: {failure.message}")
        error: Exception = found(failure.message, request=self._request)
        return error


def _stream_class(library: Any) -> Any:
    class RecordedStream(library.SyncByteStream):  # type: ignore[misc]
        """The body of an answer as the library reads it."""

        def __init__(self, body: Body, exchange: _Exchange) -> None:
            self._body = body
            self._exchange = exchange

        def __iter__(self) -> Iterator[bytes]:
            try:
                yield from self._body
            except Failed as failed:
                raise self._exchange.error(failed.failure) from None

        def close(self) -> None:
            self._body.close()

    return RecordedStream


_DOC = """A transport for {library} that records LLM calls, over an inner one of your own.

    ::

        {library}.Client(transport={name}({library}.HTTPTransport(verify=context)))

    Requests outside an execution, and those whose body is no JSON object, go to the inner
    transport untouched.

    Args:
        inner: what sends the requests; a fresh ``HTTPTransport`` by default.
        retries: how often a transient failure (a connection error, a time-out, status 408, 409,
            429 or 5xx) is tried again within the one step, after the pause that ``Retry-After``
            asks for or a growing one of its own. Only the last outcome is recorded.

    Raises:
        ValueError: ``retries`` is no number of tries, or ``inner`` records already.
    """


@functools.cache
def transport_class(library: str) -> Any:
    """Return the transport for ``"httpx2"`` or ``"httpx"``.

    Raises:
        ImportError: the library is not installed.
    """
    module = importlib.import_module(library)
    name = f"{library.upper()}Transport"
    return type(
        name,
        (RecordingTransport, module.BaseTransport),
        {
            "__module__": __name__,
            "__doc__": _DOC.format(library=library, name=name),
            "library": module,
            "_stream_class": _stream_class(module),
        },
    )


if TYPE_CHECKING:
    import httpx
    import httpx2

    class HTTPX2Transport(RecordingTransport, httpx2.BaseTransport): ...

    class HTTPXTransport(RecordingTransport, httpx.BaseTransport): ...

else:

    def __getattr__(name: str) -> Any:
        for library in _LIBRARIES:
            if name == f"{library.upper()}Transport":
                return transport_class(library)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def needed_library() -> str:
    """Return which of the two the installed provider libraries need.

    Raises:
        ImportError: neither is installed.
        ValueError: one provider library needs the one, and one the other.
    """
    needed = {found for provider in _PROVIDERS if (found := _needed_by(provider))}
    if len(needed) > 1:
        raise ValueError(
            "one of openai and anthropic needs httpx2 and the other httpx: say which client this "
            "is for, library='httpx2' or library='httpx'"
        )
    installed = [name for name in _LIBRARIES if importlib.util.find_spec(name)]
    if not (needed or installed):
        raise ImportError(
            "http_client() needs httpx2 or httpx, which come with the provider libraries: "
            "pip install 'rebuno-sync[openai]' or 'rebuno-sync[anthropic]'"
        )
    return needed.pop() if needed else installed[0]


def _needed_by(provider: str) -> str | None:
    try:
        requirements = importlib.metadata.requires(provider) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    always = (r for r in requirements if "extra ==" not in r)
    names = {match[0].lower() for r in always if (match := _NAME.match(r))}
    return next((name for name in _LIBRARIES if name in names), None)


def new_client(library: str | None, transport: Any, retries: int, options: dict[str, Any]) -> Any:
    """Return the client that :func:`rebuno_sync.http_client` describes."""
    if library is not None and library not in _LIBRARIES:
        raise ValueError(f"library is 'httpx2' or 'httpx', not {library!r}")
    name = library or needed_library()
    recording = transport_class(name)
    module = recording.library
    # As the provider libraries set up clients of their own.
    options.setdefault("follow_redirects", True)
    limits = module.Limits(max_connections=1000, max_keepalive_connections=100)
    options.setdefault("limits", limits)
    client = module.Client(transport=transport, **options)
    # The client has worked out proxies, certificates and mounts; each way out is wrapped.
    client._transport = recording(client._transport, retries=retries)
    client._mounts = {
        pattern: inner and recording(inner, retries=retries)
        for pattern, inner in client._mounts.items()
    }
    return client
