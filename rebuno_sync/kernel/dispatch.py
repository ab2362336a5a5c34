"""The threads that deliver dispatches to agents, and see to whatever else becomes due.

One scheduler thread sleeps until the next due time, or until it is woken: by a commit that
queued something, by a delivery that ended, by a moved clock. Each delivery runs on a thread of
its own out of a bounded number, and one agent gets a part of them at most, so that a slow
webhook holds up nobody else's.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import orjson
import requests

from rebuno_sync import signing, wire
from rebuno_sync.kernel import approvals, deadlines, deliveries
from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.deliveries import Claim
from rebuno_sync.kernel.metrics import Metrics
from rebuno_sync.kernel.store import Store, StoreError
from rebuno_sync.kernel.webhook_connections import PromptAdapter

_log = logging.getLogger(__name__)

Post = Callable[[Claim], int]

#: How long an agent may take to answer a webhook, in seconds.
WEBHOOK_TIMEOUT = 30.0
_MAX_DELIVERIES = 32
_MAX_DELIVERIES_PER_AGENT = 8
#: Bounds the sleep, since the wall clock may be set while the scheduler sleeps.
_LONGEST_SLEEP = 2.0
_PAUSE_AFTER_ERROR = 0.5
_LONGEST_REASON = 200


class Unanswered(Exception):
    """A webhook came to no answer. Why is recorded with the execution, so it holds no secret."""


class Dispatcher:
    """Delivers what is queued, from :meth:`start` to :meth:`stop`.

    Args:
        store: the database.
        clock: the time; when it is moved, what became due happens before the move returns.
        lease_timeout: for agents that were registered without one, in seconds.
        metrics: told of deliveries and of leases that ran out.
        post: delivers a claimed dispatch; returns the status, or raises :class:`Unanswered`.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        lease_timeout: float,
        metrics: Metrics,
        post: Post | None = None,
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._post = post or post_webhook
        self._clock = clock
        self._lease_timeout = lease_timeout
        self._condition = threading.Condition()
        self._woken = False
        self._stopping = False
        self._in_progress: collections.Counter[str] = collections.Counter()
        self._scheduling = threading.Lock()
        self._scheduler: threading.Thread | None = None

    def start(self) -> None:
        """Start the scheduler thread."""
        self._clock.subscribe(self._on_clock_moved)
        self._scheduler = threading.Thread(
            target=self._schedule, name="rebuno-kernel-scheduler", daemon=True
        )
        self._scheduler.start()

    def stop(self, timeout: float) -> None:
        """Start no more deliveries, and wait up to ``timeout`` seconds for those in progress.

        One that takes longer keeps its lease, and its outcome is not recorded: the dispatch is
        delivered again when the lease runs out.
        """
        self._clock.unsubscribe(self._on_clock_moved)
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._scheduler is not None:
            self._scheduler.join()
        with self._condition:
            if not self._condition.wait_for(lambda: not self._in_progress, timeout):
                _log.warning("%d webhooks are still unanswered", self._in_progress.total())

    def wake(self) -> None:
        """Tell the scheduler that something may be due sooner than it knew."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def settle(self) -> None:
        """Do all that is due by now: deadlines, leases, approvals, and the start of deliveries."""
        with self._scheduling:
            if self._due_in() <= 0:
                with self._store.write() as tx:
                    deadlines.expire(tx)
                    reclaimed = deliveries.reclaim(tx)
                    approvals.expire(tx)
                self._metrics.lease_reclaims.inc(reclaimed)
                while self._deliver_next():
                    pass

    def _on_clock_moved(self) -> None:
        self.settle()
        self.wake()  # it sleeps until a time that may have come nearer

    def _schedule(self) -> None:
        failing = False
        while True:
            try:
                self.settle()
                pause = min(self._due_in(), _LONGEST_SLEEP)
                failing = False
            except Exception as exc:
                if self._stopping:
                    return
                if not failing:
                    # What the disk does is told in its own words, and once.
                    known = isinstance(exc, StoreError)
                    _log.error(
                        "the scheduler failed; it goes on: %s", exc, exc_info=None if known else exc
                    )
                failing = True
                pause = _PAUSE_AFTER_ERROR
            with self._condition:
                self._condition.wait_for(lambda: self._woken or self._stopping, pause)
                self._woken = False
                if self._stopping:
                    return

    def _due_in(self) -> float:
        """Return the seconds until something is due that can be done now."""
        busy = self._busy_agents()
        with self._store.read() as tx:
            times = (deliveries.next_due(tx, busy), deadlines.next_due(tx))
            due = min((t for t in times if t is not None), default=None)
            return _LONGEST_SLEEP if due is None else due - tx.now

    def _busy_agents(self) -> list[str] | None:
        """Return the agents that may have no further delivery now; ``None`` for all agents."""
        with self._condition:
            if self._stopping or self._in_progress.total() >= _MAX_DELIVERIES:
                return None
            return [a for a, n in self._in_progress.items() if n >= _MAX_DELIVERIES_PER_AGENT]

    def _deliver_next(self) -> bool:
        busy = self._busy_agents()
        if busy is None:
            return False
        with self._store.write() as tx:
            claim = deliveries.claim(tx, busy, self._lease_timeout)
        if claim is None:
            return False
        with self._condition:
            self._in_progress[claim.agent_id] += 1
        threading.Thread(
            target=self._deliver, args=(claim,), name="rebuno-kernel-webhook", daemon=True
        ).start()
        return True

    def _deliver(self, claim: Claim) -> None:
        try:
            answered, failure = True, ""
            try:
                status = self._post(claim)
                if not 200 <= status < 300:
                    failure = f"answered HTTP {status}"
            except Unanswered as exc:
                answered, failure = False, str(exc)
            with self._store.write() as tx:
                if failure:
                    deliveries.undelivered(tx, claim, answered, failure)
                else:
                    deliveries.delivered(tx, claim)
                    self._metrics.delivery_seconds.observe(max(0.0, tx.now - claim.due_at))
        except Exception as exc:
            # Not recorded: the lease will run out, and the dispatch be delivered again.
            if not self._stopping:
                _log.error(
                    "the outcome of a delivery to %s was lost: %s",
                    claim.agent_id,
                    exc,
                    exc_info=None if isinstance(exc, StoreError) else exc,
                )
        finally:
            with self._condition:
                self._in_progress -= collections.Counter({claim.agent_id: 1})
                self._woken = True
                self._condition.notify_all()


def webhook_body(claim: Claim) -> bytes:
    """Return the body of the webhook for a claimed dispatch (PROTOCOL 2, generation 3)."""
    return orjson.dumps(
        {
            "execution_id": claim.execution_id,
            "dispatch_id": claim.dispatch_id,
            "dispatch_attempt": claim.attempt,
            "lease_timeout_seconds": claim.lease_timeout,
        }
    )


def post_webhook(claim: Claim, timeout: float | None = None) -> int:
    """Post the webhook; return the status.

    Args:
        claim: what to deliver.
        timeout: how long to wait for the status, in seconds; :data:`WEBHOOK_TIMEOUT` by default.

    Raises:
        Unanswered: there is nobody to ask, or no status came in time.
    """
    if claim.webhook_url is None:
        _log.warning("agent %s is not registered any more", claim.agent_id)
        raise Unanswered("the agent is not registered any more")
    patience = WEBHOOK_TIMEOUT if timeout is None else timeout
    body = webhook_body(claim)
    headers = {
        "Content-Type": "application/json",
        # A kept-alive connection that the agent just closed would look like a failed delivery.
        "Connection": "close",
        wire.EXECUTION_ID_HEADER: claim.execution_id,
        wire.SIGNATURE_HEADER: signing.sign_body(claim.secret, body),
    }
    try:
        with requests.Session() as session:
            session.trust_env = False  # neither a proxy nor .netrc is meant for a webhook
            for scheme in ("http://", "https://"):
                session.mount(scheme, PromptAdapter())
            with session.post(
                claim.webhook_url,
                data=body,
                headers=headers,
                timeout=patience,
                allow_redirects=False,
                stream=True,
            ) as answer:
                status = answer.status_code
    except (requests.RequestException, OSError, ValueError) as exc:
        late = isinstance(exc, requests.Timeout)
        why = f"timed out after {patience:g} s" if late else _why(exc)[:_LONGEST_REASON]
        _log.warning(
            "the webhook of agent %s at %s did not answer: %s",
            claim.agent_id,
            urlsplit(claim.webhook_url).netloc.rpartition("@")[2],  # the rest may be secret
            why,
        )
        raise Unanswered(why) from exc
    if not 200 <= status < 300:
        _log.warning("the webhook of agent %s answered %d", claim.agent_id, status)
    return status


def _why(exc: BaseException) -> str:
    """Return what the innermost error says: what wraps it tells of pools and retries."""
    for inner in (*exc.args, getattr(exc, "reason", None), exc.__cause__):
        if isinstance(inner, BaseException):
            return _why(inner)
    if isinstance(exc, OSError) and not isinstance(exc, requests.RequestException):
        return exc.strerror or str(exc)
    return type(exc).__name__  # what HTTP libraries say quotes the URL
