"""What each generation of kernel sends and demands (PROTOCOL 2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One column of the table in PROTOCOL 2."""

    number: int
    sends_attempt: bool
    sends_lease_timeout: bool
    signature_prefix: str
    checks_lease: bool
    agent_fields: tuple[str, str, str, str]

    def __str__(self) -> str:
        return f"generation {self.number}"

    def fields(self, call: str) -> frozenset[str]:
        """The names that the body of a call may hold; any other is refused with 400."""
        known = _FIELDS[call]
        return known | _FIELDS_3.get(call, frozenset()) if self.number == 3 else known


_FIELDS = {
    "submit": frozenset({"kind", "target", "args", "idempotency"}),
    "step_complete": frozenset({"result"}),
    "step_fail": frozenset({"error"}),
    "stream": frozenset({"seq", "data"}),
    "heartbeat": frozenset[str](),
    "complete": frozenset({"output"}),
    "fail": frozenset({"error"}),
    "create": frozenset({"agent_id", "input"}),
    "register": frozenset({"id", "webhook_url", "secret"}),
    "decide": frozenset({"decided_by", "rationale"}),
}
_CAPTURES = frozenset({"captures", "capture_failures"})
_FIELDS_3 = {
    "submit": frozenset({"resources"}),
    "step_complete": _CAPTURES,
    "step_fail": _CAPTURES,
    "complete": _CAPTURES | {"state"},
    "create": frozenset(
        {"session", "parent_execution_id", "idempotency_key", "spawned_by", "on_behalf_of"}
    ),
    "register": frozenset({"lease_timeout_seconds"}),
}

GENERATION_1 = Generation(
    number=1,
    sends_attempt=False,
    sends_lease_timeout=False,
    signature_prefix="sha256=",
    checks_lease=False,
    agent_fields=("ID", "WebhookURL", "PolicyBundle", "RegisteredAt"),
)
GENERATION_2 = Generation(
    number=2,
    sends_attempt=True,
    sends_lease_timeout=False,
    signature_prefix="sha256=",
    checks_lease=True,
    agent_fields=("id", "webhook_url", "policy_bundle", "registered_at"),
)
GENERATION_3 = Generation(
    number=3,
    sends_attempt=True,
    sends_lease_timeout=True,
    signature_prefix="v1=",
    checks_lease=True,
    agent_fields=("id", "webhook_url", "policy_bundle", "registered_at"),
)
