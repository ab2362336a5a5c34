"""What users call to get an HTTP session or client that records LLM calls.

The HTTP libraries are imported by the call, not by ``import rebuno_sync``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import httpx
    import httpx2
    import requests
    from requests.adapters import BaseAdapter


def requests_session(
    *, adapter: BaseAdapter | None = None, retries: int = 0, **settings: Any
) -> requests.Session:
    """Return a ``requests.Session`` that records LLM calls (PROTOCOL 11).

    Within an execution each request with a JSON object as its body is a step of kind
    ``llm_call`` whose target is the body's ``model``; its answer, error or time-out is recorded,
    and a replay gets it back without asking the provider. Everything else passes through.

    Args:
        adapter: what sends the requests; a fresh ``HTTPAdapter`` by default. To keep a session
            of your own, mount a :class:`~rebuno_sync.effects.llm_requests.RebunoAdapter` on it.
        retries: how often a transient failure (a connection error, a time-out, status 408, 409,
            429 or 5xx) is tried again within the one step, after the pause that ``Retry-After``
            asks for (up to 120 seconds; beyond that it is not tried again) or a growing one of
            its own. Only the last outcome is recorded.
        settings: attributes of the session: ``headers``, ``auth``, ``proxies``, ``verify``, ….

    Raises:
        TypeError: a session has no such setting.
        ValueError: ``retries`` is no number of tries, or ``adapter`` records already.
    """
    from .llm_requests import new_session

    return new_session(adapter, retries, settings)


@overload
def http_client(
    *,
    library: Literal["httpx2"] | None = None,
    transport: httpx2.BaseTransport | None = None,
    retries: int = 0,
    **options: Any,
) -> httpx2.Client: ...


@overload
def http_client(
    *,
    library: Literal["httpx"],
    transport: httpx.BaseTransport | None = None,
    retries: int = 0,
    **options: Any,
) -> httpx.Client: ...


def http_client(
    *,
    library: Literal["httpx2", "httpx"] | None = None,
    transport: Any = None,
    retries: int = 0,
    **options: Any,
) -> Any:
    """Return a client that records LLM calls, for ``OpenAI(http_client=…)`` and the like.

    Within an execution each request with a JSON object as its body is a step of kind
    ``llm_call`` whose target is the body's ``model``; its answer, error or time-out is recorded,
    and a replay gets it back without asking the provider. Everything else passes through.

    Args:
        library: ``"httpx2"`` or ``"httpx"``; what the installed ``openai`` and ``anthropic`` need
            by default, and without these whichever of the two is installed, ``httpx2`` first.
        transport: what sends the requests; the library's own by default, with the proxies and
            certificates of ``options`` and the environment.
        retries: how often a transient failure (a connection error, a time-out, status 408, 409,
            429 or 5xx) is tried again within the one step, after the pause that ``Retry-After``
            asks for (up to 120 seconds; beyond that it is not tried again) or a growing one of
            its own. Only the last outcome is recorded. The provider library's own retries are
            steps of their own; with this set, give it ``max_retries=0``.
        options: what the library's ``Client`` takes: ``timeout``, ``proxy``, ``verify``, ….
            Redirects are followed by default, as the provider libraries do.

    Raises:
        ImportError: the library is not installed.
        ValueError: an argument makes no sense, or the installed provider libraries need both.
    """
    from .llm_httpx import new_client

    return new_client(library, transport, retries, options)
