"""Whether the kernel, the agent and its webhook agree: asked over the network, changing nothing."""

from __future__ import annotations

import email.utils
import secrets
import time
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

from rebuno_sync import signing
from rebuno_sync.agent_secrets import Secrets
from rebuno_sync.cli.doctor.findings import Finding
from rebuno_sync.cli.doctor.probe import Agent
from rebuno_sync.client import Client
from rebuno_sync.errors import (
    APIError,
    ForbiddenError,
    NetworkError,
    NotFoundError,
    RebunoError,
    UnauthorizedError,
)
from rebuno_sync.kernel_client import KernelClient
from rebuno_sync.lease import Lease
from rebuno_sync.transport import Answer, Transport
from rebuno_sync.wire import SIGNATURE_HEADER, AgentInfo, Dispatch

_TIMEOUT = 10.0
#: A clock that is off by more seconds than this is worth a word, long before it costs a call.
_NOTABLE_SKEW = 30
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_kernel(url: str) -> Iterator[Finding]:
    """Look at a kernel: reachable, ready, with the same time as here."""
    try:
        transport = Transport(url, timeout=_TIMEOUT)
    except ValueError as exc:
        yield Finding(
            "error", "kernel-url", str(exc), "Nothing can be reached there.", "Set REBUNO_URL."
        )
        return
    begin = time.time()
    try:
        answer = transport.request("GET", "/v0/ready", b"", lambda target: {})
    except NetworkError as exc:
        yield Finding(
            "error",
            "kernel-reachable",
            str(exc),
            "Agents can read no execution and record no step; dispatches are abandoned.",
            "Start the kernel, or set REBUNO_URL to where it is; look at proxies and firewalls.",
        )
        return
    yield _readiness(url, answer)
    yield from _skew(answer, (begin + time.time()) / 2)


def _readiness(url: str, answer: Answer) -> Finding:
    if answer.status == 200:
        return Finding("ok", "kernel-ready", f"the kernel at {url} is ready")
    if answer.status == 404:
        return Finding(
            "error",
            "kernel-ready",
            f"{url} answers, but there is no kernel: /v0/ready is HTTP 404",
            "Every call of the agents would end so.",
            "Set REBUNO_URL to the kernel's base URL, without /v0.",
        )
    return Finding(
        "error",
        "kernel-ready",
        f"the kernel at {url} is not ready: HTTP {answer.status}",
        "It delivers nothing and records nothing until it is.",
        "See the kernel's log; most often its database cannot be reached.",
    )


def _skew(answer: Answer, here: float) -> Iterator[Finding]:
    told = email.utils.parsedate_tz(answer.headers.get("date", ""))
    if told is None:
        return
    # The header has whole seconds, cut off.
    skew = here - (email.utils.mktime_tz(told) + 0.5)
    size = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the kernel's"
    if abs(skew) < _NOTABLE_SKEW:
        yield Finding("ok", "clock", "the clock here agrees with the kernel's")
        return
    limit = signing.MAX_CLOCK_SKEW
    yield Finding(
        "warning",
        "clock",
        f"the clock here is {size}",
        (
            f"Kernels refuse request signatures that are {limit} s off: each process of the agents "
            "pays one refused call, then signs by the kernel's clock. "
            if abs(skew) >= limit
            else f"From {limit} s on, each process of the agents pays one refused call. "
        )
        + "Times in its logs and in what the kernel records do not fit together.",
        "Keep both clocks with NTP (systemd-timesyncd, chrony).",
    )


def check_signature(agent: Agent) -> Finding:
    """See whether the kernel takes the agent's signature: an authenticated read tells."""
    try:
        if _accepts(agent, secrets.token_hex(16)):
            return Finding(
                "info",
                "secret",
                f"the kernel does not check signatures, so nothing is known of "
                f"{agent.agent_id}'s secret",
            )
        known = next((one for one in agent.secrets if _accepts(agent, one)), None)
    except RebunoError as exc:
        return Finding(
            "warning", "secret", f"the secret of {agent.agent_id} could not be tried: {exc}"
        )
    if known is not None and known == agent.secrets[0]:
        return Finding("ok", "secret", f"the kernel takes the signature of {agent.agent_id}")
    if known is not None:
        return Finding(
            "warning",
            "secret",
            f"the kernel knows an older secret of {agent.agent_id}",
            "The agent works meanwhile; each process finds out by a refused call.",
            "Register it with the first secret of the list, then drop the others: "
            f"rebuno-sync agents add {agent.agent_id} WEBHOOK_URL",
        )
    return Finding(
        "error",
        "secret",
        f"the kernel refuses the signature of {agent.agent_id}",
        "Either it does not know the agent, or by another secret: it can deliver nothing that the "
        "agent takes, and takes nothing that the agent says.",
        f"Register it with the secret of this environment: rebuno-sync agents add {agent.agent_id} "
        "WEBHOOK_URL",
    )


def _accepts(agent: Agent, secret: str) -> bool:
    transport = Transport(agent.base_url, timeout=_TIMEOUT)
    kernel = KernelClient(agent.agent_id, Secrets(secret), transport)
    nowhere = Dispatch(str(uuid.uuid4()), str(uuid.uuid4()))
    try:
        kernel.execution(nowhere.execution_id, Lease(nowhere))
    except UnauthorizedError:
        return False
    except (NotFoundError, ForbiddenError):
        return True
    return True


def registration(client: Client, agent_id: str) -> AgentInfo | Finding:
    """Return how the kernel knows an agent, or what keeps that from being known."""
    try:
        return client.agent(agent_id)
    except NotFoundError:
        return Finding(
            "error",
            "registration",
            f"the kernel does not know the agent {agent_id}",
            "No execution of it can be created.",
            f"rebuno-sync agents add {agent_id} WEBHOOK_URL",
        )
    except (UnauthorizedError, ForbiddenError):
        return Finding(
            "info",
            "registration",
            f"without a token that may read agents, the webhook of {agent_id} is not known here",
            "",
            "Set REBUNO_API_KEY, or pass --webhook-url.",
        )
    except (APIError, NetworkError) as exc:
        return Finding("warning", "registration", f"{agent_id}: {exc}")


def check_webhook(agent: Agent, url: str) -> Iterator[Finding]:
    """See whether the agent answers at a webhook URL, and has the secret that is known here.

    It is sent one request that is not signed and one that is no dispatch; an agent runs neither.
    """
    host = (urlsplit(url).hostname or "").lower()
    kernel_host = (urlsplit(agent.base_url).hostname or "").lower()
    if host in _LOOPBACK and kernel_host not in _LOOPBACK:
        yield Finding(
            "error",
            "webhook-url",
            f"the webhook of {agent.agent_id} is {url}, and the kernel is at {kernel_host}",
            "To the kernel that address is the machine it runs on itself.",
            "Register the agent with an address that the kernel reaches.",
        )
    yield from _route(agent, url)
    try:
        unsigned = _post(url, {})
        signed = _post(url, {SIGNATURE_HEADER: signing.sign_body(agent.secrets[0], b"{}")})
    except NetworkError as exc:
        # The transport speaks of its other end as a kernel, which this one is not.
        why = str(exc).removeprefix("the kernel at ")
        yield Finding(
            "error",
            "webhook",
            f"the webhook of {agent.agent_id} cannot be reached from here: {why}",
            "If it is the same from where the kernel is, deliveries fail, and after five of them "
            "executions do.",
            "Start the app, or register the agent with the URL where it is.",
        )
        return
    yield _answers(agent, url, unsigned, signed)


def _route(agent: Agent, url: str) -> Iterator[Finding]:
    path = urlsplit(url).path or "/"
    if agent.routes and not any(path.endswith(route) for route in agent.routes):
        yield Finding(
            "warning",
            "webhook-path",
            f"the webhook of {agent.agent_id} is registered as {path}, and the app has it at "
            f"{', '.join(agent.routes)}",
            "Unless a proxy rewrites it, deliveries are answered with 404.",
            "Register the agent with the path that the app has.",
        )


def _post(url: str, headers: dict[str, str]) -> int:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    transport = Transport(f"{parts.scheme}://{parts.netloc}", timeout=_TIMEOUT)
    sent = {"Content-Type": "application/json", **headers}
    return transport.request("POST", target, b"{}", lambda _: sent).status


def _answers(agent: Agent, url: str, unsigned: int, signed: int) -> Finding:
    if unsigned != 401:
        takes_all = unsigned < 500 and unsigned != 404
        return Finding(
            "error",
            "webhook",
            f"{url} answers HTTP {unsigned} to what is not signed; an agent answers 401",
            "Something else listens there"
            + (", or it takes dispatches from anyone." if takes_all else "."),
            "Register the agent with the URL of its webhook; keep other authentication and "
            "redirects away from that path.",
        )
    if signed == 401:
        return Finding(
            "error",
            "webhook-secret",
            f"the agent at {url} has another secret than {agent.agent_id} has here",
            "The app that runs there was started with another REBUNO_AGENT_SECRET.",
            "Give both the same secret and restart the app.",
        )
    if signed >= 500:
        return Finding(
            "error",
            "webhook",
            f"the agent at {url} answers HTTP {signed} to what is signed",
            "It takes no dispatches now.",
            "See the log of the app; 503 is an agent that shuts down.",
        )
    return Finding("ok", "webhook", f"the agent {agent.agent_id} answers at {url}")
