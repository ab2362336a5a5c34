"""Proxies and certificate bundles, taken from the environment as requests takes them."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from rebuno_sync import transport as transport_module
from rebuno_sync.errors import NetworkError
from rebuno_sync.transport import Resend, Transport
from tests.unit.sockets import Connection, SocketServer, pump, reserved_port

VARIABLES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "SSL_CERT_FILE",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(transport_module, "_FIRST_PAUSE", 0.001)


class Proxy:
    """An HTTP proxy on a port of its own: forwards plain requests, tunnels with CONNECT."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.server = SocketServer(self._serve)

    def _serve(self, connection: Connection) -> None:
        while request := connection.request():
            self.heads.append(request)
            line = request.split(b"\r\n")[0]
            if line.startswith(b"CONNECT"):
                self._tunnel(connection, line)
                return
            # The origin is played by the proxy itself.
            connection.answer(b'{"by":"proxy"}')

    def _tunnel(self, connection: Connection, line: bytes) -> None:
        host, _, port = line.split(b" ")[1].decode().rpartition(":")
        with socket.create_connection((host, int(port))) as origin:
            connection.sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=pump, args=(origin, connection.sock))
            back.start()
            pump(connection.sock, origin)
            back.join()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    with proxy.server:
        yield proxy


def call(url: str, **options: object) -> object:
    transport = Transport(url, timeout=30)
    answer = transport.request(
        "POST",
        "/v0/x?a=1",
        b"{}",
        lambda target: {"X-Signed": target},
        **options,  # type: ignore[arg-type]
    )
    return answer.json()


def test_a_plain_kernel_behind_a_proxy(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    address = proxy.server.url.replace("http://", "http://ann:se%20cret@")
    monkeypatch.setenv("http_proxy", address)
    assert call("http://kernel.example:8080/base") == {"by": "proxy"}
    rows = proxy.heads[0].split(b"\r\n")
    assert rows[0] == b"POST http://kernel.example:8080/base/v0/x?a=1 HTTP/1.1"
    assert b"Host: kernel.example:8080" in rows
    assert b"X-Signed: /base/v0/x?a=1" in rows, "what is signed is the target the kernel sees"
    credentials = base64.b64encode(b"ann:se cret")
    assert b"Proxy-Authorization: Basic " + credentials in rows


def test_hosts_that_need_no_proxy(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def serve(connection: Connection) -> None:
        while connection.request():
            connection.answer(b'{"by":"origin"}')

    with SocketServer(serve) as origin:
        assert call(origin.url) == {"by": "origin"}
        assert call("http://kernel.example") == {"by": "proxy"}
    assert len(proxy.heads) == 1


def test_streams_take_the_proxy_too(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy.server.url)
    transport = Transport("http://kernel.example", timeout=30)
    with transport.open_stream("/v0/s", {}, read_timeout=30) as stream:
        assert stream.content == b'{"by":"proxy"}'


def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{port}")
            with pytest.raises(NetworkError, match="could not be reached") as caught:
                call(f"{scheme}://kernel.example", resend=Resend.NEVER_ARRIVED)
            assert caught.value.never_arrived


def test_a_proxy_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def serve(connection: Connection) -> None:
        seen.append(connection.request())
        connection.reset()

    with SocketServer(serve) as server:
        monkeypatch.setenv("http_proxy", server.url)
        with pytest.raises(NetworkError) as caught:
            call("http://kernel.example", resend=Resend.NEVER_ARRIVED, patience=60)
    assert not caught.value.never_arrived
    assert len(seen) == 1


# TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def bundle(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def secure(authority: trustme.CA) -> Iterator[SocketServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def serve(connection: Connection) -> None:
        while connection.request():
            connection.answer(b'{"by":"tls"}')

    with SocketServer(serve, tls=context) as server:
        yield server


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_a_bundle_from_the_environment(
    secure: SocketServer, bundle: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, bundle)
    assert call(secure.url) == {"by": "tls"}
    with Transport(secure.url, timeout=30).open_stream("/s", {}, read_timeout=30) as stream:
        assert stream.json() == {"by": "tls"}


def test_an_unknown_authority(secure: SocketServer) -> None:
    with pytest.raises(NetworkError, match="CERTIFICATE_VERIFY_FAILED"):
        call(secure.url)


def test_a_bundle_is_for_those_who_asked_for_it(
    secure: SocketServer, bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools are shared in a process; what one trusts must not spread to another."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", bundle)
    assert call(secure.url) == {"by": "tls"}
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(NetworkError, match="CERTIFICATE_VERIFY_FAILED"):
        call(secure.url)


def test_a_bundle_that_is_not_there(secure: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem")
    with pytest.raises(NetworkError, match=r"/no/such/bundle\.pem"):
        call(secure.url)


def test_a_certificate_for_another_host(
    authority: trustme.CA, bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("elsewhere.example").configure_cert(context)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", bundle)
    server = SocketServer(lambda connection: None, tls=context)
    with server, pytest.raises(NetworkError, match="CERTIFICATE_VERIFY_FAILED"):
        call(server.url)


def test_tls_through_a_proxy(
    proxy: Proxy, secure: SocketServer, bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", proxy.server.url)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", bundle)
    assert call(secure.url) == {"by": "tls"}
    assert proxy.heads[0].startswith(f"CONNECT 127.0.0.1:{secure.port} HTTP/1.".encode())
    assert b"X-Signed" not in proxy.heads[0]


def test_a_big_request_arrives_whole(proxy: Proxy, secure: SocketServer, bundle: str) -> None:
    body = b'"' + b"x" * 3_000_000 + b'"'
    seen: list[int] = []

    def serve(connection: Connection) -> None:
        while request := connection.request():
            seen.append(len(request.partition(b"\r\n\r\n")[2]))
            connection.answer(body)

    with SocketServer(serve) as server:
        transport = Transport(server.url, timeout=30)
        for _ in range(2):
            answer = transport.request("POST", "/", body, lambda target: {})
            assert answer.body == body
    assert seen == [len(body)] * 2
