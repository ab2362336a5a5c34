"""The sessions, clients, adapters and transports that users make."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter

from rebuno_sync import http_client, requests_session
from rebuno_sync.effects import llm_httpx
from rebuno_sync.effects.llm_requests import RebunoAdapter

LIBRARIES = [name for name in ("httpx2", "httpx") if importlib.util.find_spec(name)]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def test_importing_the_package_loads_no_http_library() -> None:
    code = (
        "import sys, rebuno_sync; from rebuno_sync import http_client, requests_session\n"
        "print([m for m in ('requests', 'urllib3', 'httpx', 'httpx2', 'httpcore', 'openai', "
        "'anthropic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_making_a_client_loads_only_its_library(library: Any) -> None:
    code = (
        "import sys; from rebuno_sync import http_client\n"
        f"http_client(library={library.__name__!r})\n"
        "print([m for m in ('requests', 'httpx', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"['{library.__name__}']"


# Which library


def installed(monkeypatch: pytest.MonkeyPatch, libraries: set[str], **needs: list[str]) -> None:
    def requires(name: str) -> list[str]:
        if name not in needs:
            raise importlib.metadata.PackageNotFoundError(name)
        return needs[name]

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name in libraries else None
    )


ON_HTTPX2 = ["anyio<5,>=4", "httpx2<3,>=2.7.0", 'httpx-aiohttp; extra == "aiohttp"']
ON_HTTPX = ["httpx<1,>=0.23.0", 'httpx2<3,>=2.7.0; extra == "httpx2"']


@pytest.mark.parametrize(
    ("libraries", "needs", "chosen"),
    [
        ({"httpx", "httpx2"}, {"openai": ON_HTTPX2}, "httpx2"),
        ({"httpx", "httpx2"}, {"openai": ON_HTTPX}, "httpx"),
        ({"httpx", "httpx2"}, {"openai": ON_HTTPX2, "anthropic": ON_HTTPX2}, "httpx2"),
        ({"httpx"}, {"anthropic": ON_HTTPX}, "httpx"),
        ({"httpx", "httpx2"}, {}, "httpx2"),
        ({"httpx"}, {}, "httpx"),
        ({"httpx"}, {"openai": ["anyio"]}, "httpx"),
    ],
)
def test_the_provider_libraries_decide(
    monkeypatch: pytest.MonkeyPatch, libraries: set[str], needs: Any, chosen: str
) -> None:
    installed(monkeypatch, libraries, **needs)
    assert llm_httpx.needed_library() == chosen


def test_two_that_need_different_ones_must_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"httpx", "httpx2"}, openai=ON_HTTPX2, anthropic=ON_HTTPX)
    with pytest.raises(ValueError, match="library='httpx2' or library='httpx'"):
        http_client()


def test_without_either_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, set())
    with pytest.raises(ImportError, match=r"pip install 'rebuno-sync\[openai\]'"):
        http_client()


def test_a_library_that_is_none_of_the_two() -> None:
    with pytest.raises(ValueError, match="library is 'httpx2' or 'httpx', not 'aiohttp'"):
        http_client(library="aiohttp")  # type: ignore[call-overload]


# Clients


def inner_of(transport: Any) -> Any:
    assert isinstance(transport, llm_httpx.RecordingTransport)
    return transport._inner


def test_a_client_is_set_up_as_the_provider_libraries_do(library: Any) -> None:
    with http_client(library=library.__name__) as client:  # type: ignore[call-overload]
        assert isinstance(client, library.Client)
        assert client.follow_redirects is True
        # A time-out of its own would replace the one of the provider library.
        assert client.timeout == library.Client().timeout
        pool = inner_of(client._transport)._pool
        assert (pool._max_connections, pool._max_keepalive_connections) == (1000, 100)


def test_a_client_takes_the_librarys_options(library: Any) -> None:
    options = {"timeout": 7.0, "follow_redirects": False, "headers": {"X-A": "1"}}
    with http_client(library=library.__name__, **options) as client:  # type: ignore[call-overload]
        assert client.timeout == library.Timeout(7.0)
        assert client.follow_redirects is False
        assert client.headers["x-a"] == "1"
    with pytest.raises(TypeError, match="odd"):
        http_client(library=library.__name__, odd=1)  # type: ignore[call-overload]


def test_proxies_are_kept_and_recorded(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "internal.test")
    with http_client(library=library.__name__) as client:  # type: ignore[call-overload]
        through = client._transport_for_url(library.URL("http://api.test/"))
        beside = client._transport_for_url(library.URL("http://internal.test/"))
    assert type(inner_of(through)._pool).__name__ == "HTTPProxy"
    assert type(inner_of(beside)._pool).__name__ == "ConnectionPool"


def test_mounts_of_the_users_are_recorded(library: Any) -> None:
    mine = library.MockTransport(lambda request: library.Response(200, text="mine"))
    with http_client(library=library.__name__, mounts={"all://mine.test": mine}) as client:  # type: ignore[call-overload]
        assert inner_of(client._transport_for_url(library.URL("http://mine.test/"))) is mine
        assert client.get("http://mine.test/").text == "mine"


def test_closing_a_client_closes_what_is_beneath(library: Any) -> None:
    calls: list[str] = []

    class Transport(library.BaseTransport):  # type: ignore[misc,name-defined]
        def __enter__(self) -> Any:
            calls.append("enter")
            return self

        def __exit__(self, *exc: Any) -> None:
            calls.append("exit")

        def close(self) -> None:
            calls.append("close")

    with http_client(library=library.__name__, transport=Transport()):  # type: ignore[call-overload]
        pass
    http_client(library=library.__name__, transport=Transport()).close()  # type: ignore[call-overload]
    assert calls == ["enter", "exit", "close"]


def test_transports_go_into_clients_of_the_users(library: Any) -> None:
    name = f"{library.__name__.upper()}Transport"
    transport = getattr(llm_httpx, name)
    assert issubclass(transport, library.BaseTransport)
    assert transport is getattr(llm_httpx, name)
    assert "A transport for" in transport.__doc__
    answer = library.MockTransport(lambda request: library.Response(200, text="mine"))
    with library.Client(transport=transport(answer)) as client:
        assert client.get("http://x.test/").text == "mine"


def test_there_are_no_other_transports() -> None:
    with pytest.raises(AttributeError, match="no attribute 'HTTPX3Transport'"):
        _ = llm_httpx.HTTPX3Transport  # type: ignore[attr-defined]


# Sessions


def test_a_session_records_both_schemes() -> None:
    session = requests_session()
    for url in ("http://x.test/", "https://x.test/"):
        assert isinstance(session.get_adapter(url), RebunoAdapter)


def test_an_adapter_goes_over_one_of_the_users() -> None:
    inner = HTTPAdapter(max_retries=3)
    session = requests.Session()
    session.mount("https://api.test/", RebunoAdapter(inner))
    adapter = session.get_adapter("https://api.test/v1")
    assert isinstance(adapter, RebunoAdapter)
    assert adapter._inner is inner
    assert not isinstance(session.get_adapter("https://other.test/"), RebunoAdapter)


def test_closing_a_session_closes_the_inner_adapter() -> None:
    class Adapter(HTTPAdapter):
        closed = False

        def close(self) -> None:
            self.closed = True

    inner = Adapter()
    requests_session(adapter=inner).close()
    assert inner.closed
