"""HTTP to one kernel: a pooled session per process, time-outs, retries, error mapping.

The session is a ``requests.Session``: it decides proxies, certificates and pools, as users of
requests expect. Each call then goes to the session's connection pool itself, since building and
parsing the request and response objects would cost more than the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import observers, wire
from .errors import NetworkError, api_error, safe_text
from .forks import after_fork
from .version import __version__

if TYPE_CHECKING:
    import requests

    from .connections import Way

USER_AGENT = f"rebuno-sync/{__version__}"
#: A kernel that does not take a connection within this many seconds is taken for unreachable.
CONNECT_TIMEOUT = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


def is_transient(status: int) -> bool:
    """Tell whether a status says nothing about the request itself, so another try may do."""
    return status >= 500 or status in (408, 425, 429)


class Resend(enum.Enum):
    """When a request may be sent again."""

    #: Whatever happened: repeating it changes nothing.
    ALWAYS = enum.auto()
    #: Only when it certainly never reached the kernel.
    NEVER_ARRIVED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Answer:
    """A status, headers (whatever their case) and a body, whatever they are."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body.

        Raises:
            NetworkError: the body is not JSON, so something else than a kernel answered.
        """
        return self._decoded

    @functools.cached_property
    def _decoded(self) -> Any:
        try:
            return wire.decode(self.body)
        except ValueError as exc:
            kind = self.headers.get("content-type", "no content type")
            raise NetworkError(
                f"the answer was HTTP {self.status} with a body that is not JSON ({kind}): {exc}"
            ) from None

    def model(self, model: type[wire.M]) -> wire.M:
        """Return the body as a model; raises :class:`NetworkError` when it is none."""
        return read_model(model, self.json())

    def models(self, model: type[wire.M]) -> list[wire.M]:
        """Return the body as a list of models; raises :class:`NetworkError` when it is none."""
        return read_models(model, self.json())

    def raise_for_status(self) -> Answer:
        """Return self when the status is 2xx.

        Raises:
            APIError: the subclass for the status, with the kernel's code and words if it sent any.
        """
        if 200 <= self.status < 300:
            return self
        code, message, details = f"http_{self.status}", "", None
        with contextlib.suppress(ValueError):
            data = wire.decode(self.body)
            if isinstance(data, dict):
                code = data.get("code") or code
                message, details = safe_text(data.get("message") or ""), data.get("details")
        if not message:
            text = self.body[:200].decode("utf-8", "replace").strip()
            message = f"the kernel answered {text!r}" if text else "the kernel gave no reason"
        if 300 <= self.status < 400:
            message += (
                f"; it points to {self.headers.get('location', 'nowhere')}, and redirects of "
                "signed requests are not followed: set the base URL to where the kernel is"
            )
        raise api_error(self.status, code, message, details)


def read_model(model: type[wire.M], data: Any) -> wire.M:
    """Return decoded JSON as a model.

    Raises:
        NetworkError: it is none, so something else than a kernel answered.
    """
    try:
        return model.from_json(data)
    except ValueError as exc:
        raise NetworkError(f"the kernel's answer makes no sense: {exc}") from None


def read_models(model: type[wire.M], rows: Any) -> list[wire.M]:
    """Return a decoded JSON list as models; ``null`` is an empty one. Raises likewise."""
    if rows is not None and not isinstance(rows, list):
        raise NetworkError(f"the kernel's answer makes no sense: {rows!r:.80} is not a list")
    return [read_model(model, row) for row in rows or ()]


class _Process:
    """What belongs to this process alone; a fork begins with a fresh one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: requests.Session | None = None


_process = _Process()


@after_fork
def _renew() -> None:
    # A socket shared with the parent would mix up two conversations, and the parent may have
    # held the lock when it forked.
    global _process
    _process = _Process()


def process_session() -> requests.Session:
    """Return the one pooled session of this process, made on first use."""
    process = _process
    with process.lock:
        if process.session is None:
            from .connections import new_session

            process.session = new_session()
        return process.session


class Transport:
    """Sends requests to one kernel.

    Args:
        base_url: where the kernel is, ``http://`` or ``https://``, with or without a path.
        timeout: how long to wait for an answer, in seconds.

    Raises:
        ValueError: ``base_url`` is not such a URL.
    """

    def __init__(self, base_url: str, *, timeout: float) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme not in ("http", "https") or not rest or rest.startswith("/"):
            raise ValueError(
                f"{base_url!r} is not a kernel URL; it looks like http://127.0.0.1:8080"
            )
        if "?" in rest or "#" in rest:
            raise ValueError(f"{base_url!r} has a query or a fragment; a kernel URL has neither")
        if "@" in rest.partition("/")[0]:
            raise ValueError(
                "the kernel URL has a user name in it, which kernels do not ask for; agents sign "
                "with their secret, and clients pass api_key=…"
            )
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._way: tuple[_Process, Way] | None = None
        self._prefix: str | None = None

    @property
    def prefix(self) -> str:
        """The escaped path that the base URL puts before every route."""
        if self._prefix is None:
            from urllib3.util import parse_url

            self._prefix = parse_url(self.base_url).path or ""
        return self._prefix

    def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Callable[[str], Mapping[str, str]],
        *,
        resend: Resend = Resend.ALWAYS,
        patience: float = 0.0,
        stop: threading.Event | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request and return whatever status came back, after the retries it is due.

        Args:
            method: the HTTP method.
            path: the escaped path below the base URL, with its query.
            body: the raw body.
            headers: called for each try with the final target, so that each is signed afresh.
            resend: when another try is allowed.
            patience: for how many seconds another try may begin.
            stop: set when another try has become pointless.
            timeout: how long to wait for each answer, in seconds; the transport's by default.

        Raises:
            NetworkError: no usable answer came, and no other try was due.
        """
        begin = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            answer, error = None, None
            try:
                answer = self._send(method, path, body, headers, timeout or self.timeout)
                if 200 <= answer.status < 300 and answer.body:
                    # A login page of some proxy says 200 too, and has not done what was asked.
                    answer.json()
            except NetworkError as exc:
                answer, error = None, exc
            else:
                if not is_transient(answer.status) or resend is not Resend.ALWAYS:
                    return answer
            may_resend = resend is Resend.ALWAYS or (error is not None and error.never_arrived)
            wait = max(pause * random.uniform(0.75, 1.25), _retry_after(answer))
            out_of_time = time.monotonic() + wait - begin > patience
            if not may_resend or out_of_time or _stopped_within(stop, wait):
                if error is not None:
                    raise error
                assert answer is not None
                return answer
            pause = min(pause * 2, _LONGEST_PAUSE)

    def open_stream(
        self, path: str, headers: Mapping[str, str], *, read_timeout: float
    ) -> requests.Response:
        """Open a long-lived answer; the caller reads and closes it.

        Args:
            path: the escaped path below the base URL.
            headers: the headers to send.
            read_timeout: the longest silence to bear, in seconds.

        Raises:
            NetworkError: the kernel could not be reached.
            APIError: it answered with an error status.
        """
        import requests

        try:
            response = process_session().get(
                self.base_url + path,
                headers={"User-Agent": USER_AGENT, **headers},
                stream=True,
                timeout=(CONNECT_TIMEOUT, read_timeout),
                allow_redirects=False,
                # Without it, requests puts what ~/.netrc says in place of the bearer token.
                auth=lambda request: request,
            )
            if response.status_code == 200:
                return response
            with response:
                answer = Answer(response.status_code, response.headers, response.content)
        except requests.RequestException as exc:
            raise NetworkError(f"{self.base_url} could not be reached: {exc}") from exc
        answer.raise_for_status()
        raise NetworkError(f"{self.base_url} answered HTTP {answer.status}, which is no stream")

    def _send(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Callable[[str], Mapping[str, str]],
        timeout: float,
    ) -> Answer:
        """Send a request once, before the eyes of whoever watches."""
        if not observers.installed:
            return self.send_once(method, path, body, headers, timeout)
        event = observers.RequestEvent(method, self.base_url, wire.route_of(path))
        watch = observers.Watch(event)

        def all_headers(target: str) -> Mapping[str, str]:
            return {**event.headers, **headers(target)}

        try:
            with watch.current():
                answer = self.send_once(method, path, body, all_headers, timeout)
            event.status = answer.status
            return answer
        except BaseException as exc:
            event.error = exc
            raise
        finally:
            watch.end()

    def send_once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Callable[[str], Mapping[str, str]],
        timeout: float,
    ) -> Answer:
        """Send a request once: the one method that a transport of another kind replaces.

        Args:
            headers: called with the final target; returns the headers to send.
            timeout: how long to wait for the answer, in seconds.

        Raises:
            NetworkError: no answer came.
        """
        from .connections import Timeout, network_error

        target = self.prefix + path
        given = headers(target)
        try:
            way = self._current_way()
            response = way.pool.urlopen(
                method,
                way.origin + target,
                body=body,
                headers={"User-Agent": USER_AGENT, **way.proxy_headers, **given},
                retries=False,
                redirect=False,
                assert_same_host=False,
                timeout=Timeout(connect=min(CONNECT_TIMEOUT, timeout), read=timeout),
            )
        except Exception as exc:
            translated = network_error(exc, self.base_url)
            if translated is None:
                raise
            raise translated from exc
        return Answer(response.status, response.headers, response.data)

    def _current_way(self) -> Way:
        if self._way is None or self._way[0] is not _process:
            from .connections import find_way

            # Taken before the session: a fork in between must not mix them up.
            owner = _process
            self._way = owner, find_way(process_session(), self.base_url)
        return self._way[1]


def _stopped_within(stop: threading.Event | None, seconds: float) -> bool:
    """Wait; tell whether another try has become pointless meanwhile."""
    if stop is not None:
        return stop.wait(seconds)
    time.sleep(seconds)
    return False


def _retry_after(answer: Answer | None) -> float:
    """Return the seconds that an answer asks to wait; at most the longest pause."""
    text = answer.headers.get("retry-after", "") if answer is not None else ""
    return min(float(text), _LONGEST_PAUSE) if text.isascii() and text.isdigit() else 0.0
