"""LLM calls made with requests: the adapter that records them (PROTOCOL 11)."""

from __future__ import annotations

import http.client
import io
from collections.abc import Callable, Iterator
from typing import Any

import requests
from requests import PreparedRequest, Response
from requests import exceptions as errors
from requests.adapters import BaseAdapter, HTTPAdapter
from urllib3 import HTTPResponse
from urllib3 import exceptions as u3

from ..context import execution_or_none
from ..errors import safe_text
from .llm import IDEMPOTENCY_KEY, Answer, Body, Failed, Failure, Incoming, call_of
from .llm_call import check_retries, perform

_CHUNK = 65_536


class RebunoAdapter(HTTPAdapter):
    """A transport adapter that records LLM calls, to mount on a session of your own.

    ::

        session.mount("https://", RebunoAdapter(HTTPAdapter(max_retries=2)))

    Requests outside an execution, and those whose body is no JSON object, go to the inner
    adapter untouched.

    Args:
        inner: what sends the requests; a fresh ``HTTPAdapter`` by default.
        retries: how often a transient failure (a connection error, a time-out, status 408, 409,
            429 or 5xx) is tried again within the one step, after the pause that ``Retry-After``
            asks for or a growing one of its own. Only the last outcome is recorded.

    Raises:
        ValueError: ``retries`` is no number of tries, or ``inner`` records already.
    """

    def __init__(self, inner: BaseAdapter | None = None, *, retries: int = 0) -> None:
        super().__init__()
        if isinstance(inner, RebunoAdapter):
            raise ValueError("the inner adapter records already; each call would be two steps")
        self._inner = HTTPAdapter() if inner is None else inner
        self._retries = check_retries(retries)

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        """Send a request, or answer it from its record; see the class."""
        settings = {"timeout": timeout, "verify": verify, "cert": cert, "proxies": proxies}
        context = execution_or_none()
        body = request.body if isinstance(request.body, (bytes, str)) else None
        call = None if context is None else call_of(body, _path(request), request.headers)
        if context is None or call is None:
            return self._inner.send(request, stream=stream, **settings)
        exchange = _Exchange(self._inner, request, settings)
        try:
            answer = perform(context, call, exchange, self._retries)
        except Failed as failed:
            raise exchange.error(failed.failure) from None
        return self.build_response(request, _Raw(answer, exchange.error))

    def close(self) -> None:
        """Close the inner adapter."""
        self._inner.close()
        super().close()


def _path(request: PreparedRequest) -> str:
    return request.path_url.partition("?")[0]


class _Exchange:
    """One request as an adapter sends it."""

    def __init__(
        self, inner: BaseAdapter, request: PreparedRequest, settings: dict[str, Any]
    ) -> None:
        self._inner = inner
        self._request = request
        self._settings = settings

    def send(self, step_id: str) -> Incoming:
        # What the caller holds stays as it was, so that it looks the same after a replay.
        request = self._request.copy()
        request.headers.setdefault(IDEMPOTENCY_KEY, step_id)
        response = self._inner.send(request, stream=True, **self._settings)
        return Incoming(response.status_code, response.headers, _chunks(response), response.close)

    def failure(self, exc: Exception) -> Failure:
        # A class of the user's own is recorded as the one of requests that it derives from.
        names = (c.__name__ for c in type(exc).__mro__ if getattr(errors, c.__name__, None) is c)
        return Failure(next(names, type(exc).__name__), safe_text(exc))

    def is_transient(self, exc: Exception) -> bool:
        if isinstance(exc, (errors.SSLError, errors.InvalidURL)):
            return False
        return isinstance(
            exc, (errors.ConnectionError, errors.Timeout, errors.ChunkedEncodingError)
        )

    def error(self, failure: Failure) -> errors.RequestException:
        """Return the error of requests that a recorded failure stands for."""
        found = getattr(errors, failure.type, None)
        if not (isinstance(found, type) and issubclass(found, errors.RequestException)):
            found = errors.RequestException
            if failure.type:
                failure = Failure("", f"{failure.type}: {failure.message}")
        return found(failure.message, request=self._request)


def _chunks(response: Response) -> Iterator[bytes]:
    """Yield the decoded body as it comes; raises what requests raises."""
    raw = response.raw
    if not isinstance(raw, HTTPResponse) or raw.chunked or not hasattr(raw, "read1"):
        yield from response.iter_content(None)
        return
    # requests itself would wait for the whole of a body that is not sent in chunks.
    try:
        while chunk := raw.read1(_CHUNK, decode_content=True):
            yield chunk
    except u3.ProtocolError as exc:
        raise errors.ChunkedEncodingError(exc) from exc
    except u3.DecodeError as exc:
        raise errors.ContentDecodingError(exc) from exc
    except u3.ReadTimeoutError as exc:
        raise errors.ConnectionError(exc) from exc
    except u3.SSLError as exc:
        raise errors.SSLError(exc) from exc


class _BodyFile(io.RawIOBase):
    """A body as a file."""

    def __init__(self, body: Body, error: Callable[[Failure], Exception]) -> None:
        self._body = body
        self._error = error
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            try:
                self._left = memoryview(next(self._body, b""))
            except Failed as failed:
                raise self._error(failed.failure) from None
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._body.close()


class _Raw(HTTPResponse):
    """What requests reads from: hands out what has come, and does not wait for more."""

    def __init__(self, answer: Answer, error: Callable[[Failure], Exception]) -> None:
        self._file = io.BufferedReader(_BodyFile(answer.body, error), _CHUNK)
        super().__init__(
            body=self._file,
            headers=dict(answer.headers),
            status=answer.status,
            version=11,
            reason=http.client.responses.get(answer.status),
            preload_content=False,
            decode_content=False,
        )

    def stream(self, amt: int | None = _CHUNK, decode_content: bool | None = None) -> Any:
        while not self._file.closed and (chunk := self._file.read1(amt or _CHUNK)):
            yield chunk


def new_session(
    adapter: BaseAdapter | None, retries: int, settings: dict[str, Any]
) -> requests.Session:
    """Return the session that :func:`rebuno_sync.requests_session` describes."""
    session = requests.Session()
    known = [name for name in requests.Session.__attrs__ if name != "adapters"]
    for name, value in settings.items():
        if name not in known:
            raise TypeError(f"a session has no setting {name!r}; it has {', '.join(known)}")
        if name in ("headers", "proxies", "params"):
            getattr(session, name).update(value)
        else:
            setattr(session, name, value)
    recording = RebunoAdapter(adapter, retries=retries)
    for scheme in ("https://", "http://"):
        session.mount(scheme, recording)
    return session
