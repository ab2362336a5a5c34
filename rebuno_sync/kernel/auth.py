"""Who sends a request: an agent by its signature, a client by its token (PROTOCOL 3)."""

from __future__ import annotations

import hmac
import re
import time

from flask import Request

from rebuno_sync import signing, wire
from rebuno_sync.errors import APIError
from rebuno_sync.kernel import keys, refusals
from rebuno_sync.kernel.hosts import Hosts
from rebuno_sync.kernel.ids import parse_id
from rebuno_sync.kernel.keys import KeyRing
from rebuno_sync.kernel.leases import Lease
from rebuno_sync.kernel.store import Store

_DECIMAL = re.compile(r"[0-9]{1,15}")


class Authenticator:
    """Tells who sends a request.

    Args:
        store: where the agents' secrets and the API keys are.
        bearer_token: what clients must show, unless they show a key; ``None`` when they need not.
        hosts: the names under which clients that need no token must ask.
        accept_body_signatures: whether a signature over the body alone will do.
        accept_generation_1: whether agents that know no attempts, and name their dispatch only
            when they submit a step, are served.
    """

    def __init__(
        self,
        store: Store,
        bearer_token: str | None,
        hosts: Hosts,
        accept_body_signatures: bool,
        accept_generation_1: bool,
    ) -> None:
        self._store = store
        self._keys = KeyRing(store)
        self._token = bearer_token
        self._hosts = hosts
        self._accept_body_signatures = accept_body_signatures
        self._accept_generation_1 = accept_generation_1

    def client(self, request: Request, scope: str) -> frozenset[str]:
        """Let a client pass that has a scope; return all that it has.

        The kernel's own token has every scope. So has a client that shows no key, where the
        kernel asks for no token.

        Raises:
            UnauthorizedError: the token is missing or wrong.
            ForbiddenError: the key lacks the scope; or there is no token, and the kernel was
                asked for under another name.
        """
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        # A header comes as Latin-1, whatever bytes were sent.
        given = token.encode("latin-1", "replace")
        if self._token is not None and hmac.compare_digest(self._token.encode(), given):
            return keys.EVERYTHING
        if token.startswith(keys.PREFIX):
            found = self._keys.find(token)
            if found is None:
                raise refusals.unauthorized("the API key is unknown, or was deleted")
            if scope not in found[1]:
                raise refusals.forbidden(f"the API key lacks the scope {scope}")
            return found[1]
        if self._token is not None:
            raise refusals.unauthorized(
                "send the kernel's token, or an API key: Authorization: Bearer <token>"
            )
        self._hosts.check(request)
        return keys.EVERYTHING

    def may(self, request: Request, scope: str) -> bool:
        """Tell whether a client has a scope: the same as :meth:`client`, for what goes on long."""
        try:
            self.client(request, scope)
        except APIError:
            return False
        return True

    def agent(self, request: Request) -> str:
        """Return the id of the agent that signed a request.

        Raises:
            UnauthorizedError: the signature is missing or wrong, or the agent is not registered.
        """
        agent_id = request.headers.get(wire.AGENT_ID_HEADER, "")
        given = request.headers.get(wire.SIGNATURE_HEADER, "")
        if not agent_id or not given:
            raise refusals.unauthorized(
                f"an agent signs its requests: {wire.AGENT_ID_HEADER} and {wire.SIGNATURE_HEADER}"
            )
        with self._store.read() as tx:
            row = tx.one("SELECT secret FROM agents WHERE id = ?", agent_id)
        secret = None if row is None else row["secret"]
        if given.startswith(signing.REQUEST_PREFIX):
            good = secret is not None and self._verify_request(request, secret, given)
        elif self._accept_body_signatures:
            good = secret is not None and signing.verify_body(secret, request.get_data(), given)
        else:
            raise refusals.unauthorized("this kernel accepts request signatures (v1=) alone")
        if not good:
            raise refusals.unauthorized(
                "the signature is not good: is the agent registered, with this secret?"
            )
        if request.method == "GET" and request.get_data():
            # Webhooks are signed as bodies are: sent back here, one would read for its agent.
            raise refusals.invalid("a GET request has no body")
        return agent_id

    def _verify_request(self, request: Request, secret: str, given: str) -> bool:
        timestamp = request.headers.get(wire.TIMESTAMP_HEADER, "")
        if not _DECIMAL.fullmatch(timestamp):
            raise refusals.unauthorized(f"{wire.TIMESTAMP_HEADER} must be decimal Unix seconds")
        # The machine's clock, even where a test moved the kernel's: the agent did not move.
        if abs(time.time() - int(timestamp)) > signing.MAX_CLOCK_SKEW:
            raise refusals.unauthorized(
                f"{wire.TIMESTAMP_HEADER} is more than {signing.MAX_CLOCK_SKEW} s off; are the"
                " clocks of agent and kernel right?"
            )
        expected = signing.sign_request(
            secret,
            request.method,
            request.environ["REQUEST_URI"],
            timestamp,
            request.get_data(),
            dispatch_id=request.headers.get(wire.DISPATCH_ID_HEADER, ""),
            dispatch_attempt=request.headers.get(wire.DISPATCH_ATTEMPT_HEADER, ""),
        )
        return signing.same_signature(expected, given)

    def reader(self, request: Request) -> str | None:
        """Return the id of the agent, or ``None`` for a client: either may read.

        Raises:
            UnauthorizedError: it is neither.
        """
        if wire.SIGNATURE_HEADER in request.headers or wire.AGENT_ID_HEADER in request.headers:
            return self.agent(request)
        self.client(request, "executions:read")
        return None

    def lease(self, request: Request, submission: bool = False) -> Lease:
        """Return the lease that the headers name.

        Args:
            submission: whether a step is submitted; even generation 1 names the dispatch then.

        Raises:
            ValidationError: a header is missing or malformed.
        """
        dispatch_id = request.headers.get(wire.DISPATCH_ID_HEADER, "")
        attempt = request.headers.get(wire.DISPATCH_ATTEMPT_HEADER, "")
        old = self._accept_generation_1
        if not dispatch_id and (submission or attempt or not old):
            raise refusals.invalid(f"the header {wire.DISPATCH_ID_HEADER} is missing")
        if not attempt and not old:
            raise refusals.invalid(f"the header {wire.DISPATCH_ATTEMPT_HEADER} is missing")
        parsed = parse_id(dispatch_id) if dispatch_id else None
        if dispatch_id and parsed is None:
            raise refusals.invalid(f"{wire.DISPATCH_ID_HEADER} must be a UUID")
        if attempt and (not _DECIMAL.fullmatch(attempt) or int(attempt) < 1):
            raise refusals.invalid(
                f"{wire.DISPATCH_ATTEMPT_HEADER} must be an integer of at least 1"
            )
        return Lease(parsed, int(attempt) if attempt else None)

    def stream_lease(self, request: Request) -> Lease | None:
        """Return the lease of a live delta; generations 1 and 2 send none.

        Raises:
            ValidationError: a header is missing or malformed.
        """
        unleased = not (
            wire.DISPATCH_ID_HEADER in request.headers
            or wire.DISPATCH_ATTEMPT_HEADER in request.headers
        )
        signature = request.headers.get(wire.SIGNATURE_HEADER, "")
        if unleased and signature.startswith(signing.BODY_PREFIX):
            return None
        return self.lease(request)
