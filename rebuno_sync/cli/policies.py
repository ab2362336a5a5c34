"""``rebuno-sync policy``: try a bundle before it decides anything, then put it in force."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rebuno_sync.cli.session import Exit, Failure, Misuse, Session, kernel_options, pass_session
from rebuno_sync.cli.times import duration_text
from rebuno_sync.cli.values import id_argument, read_text

if TYPE_CHECKING:
    from rebuno_sync.kernel.policy import Bundle, Verdict
    from rebuno_sync.kernel.policy_cases import Case, Outcome


@click.group()
@kernel_options
def policy() -> None:
    """Policies: test a bundle, put it in force."""


@policy.command()
@click.argument("bundle_file", metavar="BUNDLE")
@click.option("--cases", "cases_file", metavar="FILE", help="Steps, and what should be decided.")
@click.option(
    "--execution",
    "execution_id",
    metavar="ID",
    help="An execution: would its steps be decided as they were?",
)
@click.option(
    "--agent-id", metavar="ID", help="The agent to decide for; that of the execution by default."
)
@kernel_options
@pass_session
def test(
    session: Session,
    bundle_file: str,
    cases_file: str | None,
    execution_id: str | None,
    agent_id: str | None,
) -> None:
    """Check a policy BUNDLE, a YAML file, against expectations.

    Without --cases and --execution it is only read, and its rules are listed. Otherwise every
    decision is shown beside what was expected, and the rules that decided nothing are listed.
    The exit code is 1 when the bundle is malformed or a decision is not the expected one. Nothing
    but --execution needs a kernel.
    """
    bundle = _parse(read_text(bundle_file))
    _warn(session, bundle_file, bundle)
    cases = _cases_of_file(cases_file, agent_id)
    if execution_id is not None:
        cases += _cases_of_execution(session, execution_id, agent_id)
    if cases_file is None and execution_id is None:
        _list_rules(session, bundle)
        return
    from rebuno_sync.kernel.policy_cases import judge, unreached

    outcomes = judge(bundle, cases)
    rules = unreached(bundle, outcomes)
    wrong = sum(1 for outcome in outcomes if outcome.mismatch)
    if session.json:
        for outcome in outcomes:
            session.output.record({"case": outcome.record()})
        summary = {"cases": len(outcomes), "mismatches": wrong, "unreached_rules": rules}
        session.output.record({"summary": summary})
    else:
        _show(session, outcomes, rules, wrong)
    click.get_current_context().exit(Exit.FAILED if wrong else Exit.DONE)


def _parse(text: str) -> Bundle:
    from rebuno_sync.kernel.policy import Bundle, BundleError

    try:
        return Bundle.parse(text)
    except BundleError as exc:
        raise Failure(str(exc)) from None


def _cases_of_file(file: str | None, agent_id: str | None) -> list[Case]:
    import dataclasses

    from rebuno_sync.cli.policy_cases import parse_cases
    from rebuno_sync.kernel.policy_cases import CasesError

    if file is None:
        return []
    try:
        cases = parse_cases(read_text(file))
    except CasesError as exc:
        raise Misuse(f"{file}: {exc}") from None
    return [c if c.agent_id else dataclasses.replace(c, agent_id=agent_id or "") for c in cases]


def _cases_of_execution(session: Session, execution_id: str, agent_id: str | None) -> list[Case]:
    from rebuno_sync.cli.policy_cases import recorded_cases

    agent = agent_id or session.client.get(execution_id).agent_id
    steps, events = session.client.steps(execution_id), session.client.events(execution_id)
    return recorded_cases(agent, steps, events)


def _warn(session: Session, bundle_file: str, bundle: Bundle) -> None:
    for warning in bundle.warnings:
        session.output.note(f"{bundle_file}: {warning}")


def _show(session: Session, outcomes: Sequence[Outcome], rules: Sequence[str], wrong: int) -> None:
    output = session.output
    output.table(
        ("result", "case", "decision", "rule", "what"),
        (
            (
                "WRONG" if o.mismatch else "ok",
                o.case.name,
                o.verdict.action,
                o.verdict.rule_id,
                o.mismatch or o.verdict.reason,
            )
            for o in outcomes
        ),
        empty="There are no steps to decide.",
    )
    if rules:
        output.line(("rules that decided nothing: ", "yellow"), ", ".join(rules))
    plural = "case" if len(outcomes) == 1 else "cases"
    output.line(f"{len(outcomes)} {plural}, ", (f"{wrong} wrong", "red" if wrong else "green"))


def _list_rules(session: Session, bundle: Bundle) -> None:
    verdicts = [r.verdict for r in bundle.rules] + [bundle.unmatched]
    if session.json:
        for verdict in verdicts:
            session.output.record(
                {"rule": verdict.rule_id, "decision": verdict.action, "reason": verdict.reason}
            )
        return
    session.output.table(
        ("rule", "decision", "what"),
        ((v.rule_id, v.action, _conditions(v)) for v in verdicts),
        empty="",
    )


def _conditions(verdict: Verdict) -> str:
    said = [verdict.reason] if verdict.reason else []
    if verdict.approvers:
        said.append(f"by {', '.join(verdict.approvers)}")
    if verdict.approval_timeout is not None:
        said.append(f"within {duration_text(verdict.approval_timeout)}")
    if (limit := verdict.rate_limit) is not None:
        every = duration_text(limit.window)
        said.append(f"at most {limit.max_calls} in {every} per {limit.scope}")
    for budget in verdict.token_budgets:
        within = "" if budget.window is None else f" in {duration_text(budget.window)}"
        said.append(f"at most {budget.max_tokens} tokens{within} per {budget.scope}")
    return "; ".join(said)


@policy.command("set")
@id_argument("agent_id", "AGENT")
@click.argument("bundle_file", metavar="BUNDLE")
@kernel_options
@pass_session
def set_policy(session: Session, agent_id: str, bundle_file: str) -> None:
    """Put a BUNDLE, a YAML file, in force for AGENT, in place of what it had."""
    from rebuno_sync.kernel.policy import Bundle, BundleError

    text = read_text(bundle_file)
    session.client.set_policy(agent_id, text)
    # What the kernel took counts; what we cannot read of it another generation may.
    with contextlib.suppress(BundleError):
        _warn(session, bundle_file, Bundle.parse(text))
    if session.json:
        session.output.record({"id": agent_id, "done": "set"})
    else:
        session.output.line("set the policy of ", agent_id)
