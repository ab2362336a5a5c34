"""A kernel and agents in one process, without a socket between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from werkzeug.test import Client as WSGIClient

from ..agent import AgentCore
from ..client import Client
from ..kernel import EmbeddedKernel
from ..kernel.deliveries import Claim
from ..kernel.dispatch import post_webhook, webhook_body
from ..signing import sign_body
from ..transport import Answer, Transport

#: Where the kernel seems to be, to agents and clients that reach it in this process.
BASE_URL = "http://kernel.invalid"


class InProcessTransport(Transport):
    """Calls the kernel's WSGI application instead of a socket.

    Args:
        app: returns the application of the running kernel.
    """

    def __init__(self, app: Callable[[], Any], *, timeout: float = 35.0) -> None:
        super().__init__(BASE_URL, timeout=timeout)
        self._app = app

    def send_once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Callable[[str], Mapping[str, str]],
        timeout: float,
    ) -> Answer:
        answer = WSGIClient(self._app()).open(
            path, method=method, data=body, headers=list(headers(path).items()), base_url=BASE_URL
        )
        with answer:
            return Answer(answer.status_code, dict(answer.headers.items()), answer.get_data())


class TestKernel(EmbeddedKernel):
    """An embedded kernel in memory that agents of this process reach without a socket.

    It listens for HTTP only once :attr:`url` is asked for. :meth:`advance` moves its clock, so
    that leases, approvals and limits run out without waiting.
    """

    __test__ = False  # pytest would take it for a test

    def __init__(self, *, lease_timeout: float = 120.0) -> None:
        super().__init__(
            lease_timeout=lease_timeout,
            post=self._deliver,
            serve=False,
            allowed_hosts=("kernel.invalid",),
        )
        self._agents: dict[str, AgentCore] = {}
        self._guard = threading.Lock()

    def __enter__(self) -> TestKernel:
        self.start()
        return self

    @property
    def url(self) -> str:
        """The base URL; the kernel listens from when it is first asked for."""
        self.serve()
        return super().url

    def client(self) -> Client:
        """Return a client that reaches this kernel without a socket."""
        client = Client(BASE_URL)
        client.connect(self.transport())
        return client

    def transport(self) -> InProcessTransport:
        """Return a transport that reaches this kernel without a socket."""
        return InProcessTransport(lambda: self.app)

    def attach(self, agent: AgentCore, transport: Transport | None = None) -> None:
        """Register an agent of this process, under its own id and secret.

        Args:
            agent: the agent; from now on it speaks to this kernel.
            transport: how it does so; without a socket by default.
        """
        with self._guard:
            self._agents[agent.agent_id] = agent
        agent.connect(transport or self.transport())
        with self.client() as client:
            client.register_agent(agent.agent_id, f"{BASE_URL}/webhook", agent._secrets.all()[0])

    def is_parked(self, execution_id: str) -> bool:
        """Tell whether an execution waits for a rate limit to refill, which the clock brings."""
        with self._running().store.read() as tx:
            # A delivery that failed waits as well, but for real time and in a later attempt.
            row = tx.one(
                "SELECT 1 FROM dispatches WHERE execution_id = ? AND state = 'pending'"
                " AND attempt = 0 AND available_at > ?",
                execution_id,
                tx.now,
            )
        return row is not None

    def _deliver(self, claim: Claim) -> int:
        with self._guard:
            agent = self._agents.get(claim.agent_id)
        if agent is None:
            return post_webhook(claim)
        body = webhook_body(claim)
        status, _ = agent.deliver(body, sign_body(claim.secret, body))
        return status
