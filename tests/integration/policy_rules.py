"""A policy of ten rules, and what an agent should see of each; for our SDK and the official one."""

from __future__ import annotations

from typing import Any

from rebuno_sync import Client

RULES = """
default_action: deny
rules:
  - id: reads
    when: {targets: ['find_*', 'get_?']}
    then: {decision: allow}
  - id: interns
    when: {agent_id: intern, step_kind: tool_call}
    then: {decision: deny, reason: interns_only_read}
  - id: models
    when: {step_kind: llm_call, agent_ids: [clerk, official]}
    then: {decision: deny, reason: no_models}
  - id: listed
    when: {target: pay, arguments: {to: {one_of: [mallory, eve]}}}
    then: {decision: deny, reason: Not to them.}
  - id: gifts
    when: {target: pay, arguments: {note: {contains: gift}}}
    then: {decision: deny}
  - id: nothing
    when: {target: pay, arguments: {amount: {equals: 0}}}
    then: {decision: allow}
  - id: small
    when: {target: pay, arguments: {amount: {regex: '^[0-9]{1,2}$'}, to: {regex: '^[a-z]+$'}}}
    then: {decision: allow}
  - id: payments
    when: {target: pay}
    then:
      decision: require_approval
      approval_config: {approvers: [ann, bob], timeout: 1h, message: "Is this payment all right?"}
  - id: mail
    when: {target: 'send_*'}
    then: {decision: allow, rate_limit: {max_calls: 2, window: 1h}}
  - id: feed
    when: {target: 'sync_*'}
    then: {decision: allow, rate_limit: {max_calls: 1, window: 30s, max_wait: 1m}}
"""

#: How long an approval waits, in seconds.
APPROVAL_TIMEOUT = 3600.0
#: How long until the feed may be asked again, in seconds.
FEED_WINDOW = 30.0

#: What the handler that tries everything sees; a denial is a pair of its reason and its rule.
SURVEY: dict[str, Any] = {
    "find_order": {"number": 7},
    "get_x": "x",
    "get_xy": ["no explicit allow rule matched", "default"],
    "listed": ["Not to them.", "listed"],
    "gifts": ["policy_denied", "gifts"],
    "nothing": "paid 0 to carol",
    "small": "paid 42 to carol",
    "send_mail": ["sent 1", "sent 2", "rate_limit_exceeded"],
    # The refusal that travels through a provider's library carries no rule.
    "model": ["no_models", ""],
    "clock": 1200,
}
#: The rules that decided its steps.
SURVEY_RULES = {"reads", "listed", "gifts", "nothing", "small", "mail", "models"}


def rules_of(client: Client, execution_id: str) -> set[str]:
    """Return the rules that decided the steps of an execution."""
    payloads = (event.payload for event in client.events(execution_id))
    return {payload["rule_id"] for payload in payloads if payload.get("rule_id")}
