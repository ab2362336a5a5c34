"""``rebuno-sync keys``, and what ``dev`` does with executions that are late or old."""

from __future__ import annotations

import pytest

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.integration.test_cli import dev, lines, run
from tests.scripted import wait_until

TOKEN = "sesame"


def test_keys_are_made_listed_used_and_removed() -> None:
    with EmbeddedKernel(bearer_token=TOKEN) as kernel:
        url = kernel.url
        scopes = ("--scope", "executions:read", "--scope", "agents:read")
        made = run(url, "keys", "add", "reader", *scopes, REBUNO_API_KEY=TOKEN)
        assert made.exit_code == 0, made.stderr
        token = made.stdout.split()[-1]
        assert token.startswith("rbk_")
        assert "shown this once" in made.stderr
        assert run(url, "exec", "ls", REBUNO_API_KEY=token).exit_code == 0
        refused = run(url, "approvals", "ls", REBUNO_API_KEY=token)
        assert refused.exit_code == 1
        assert "the API key lacks the scope approvals:read" in refused.stderr

        shown = run(url, "keys", "ls", REBUNO_API_KEY=TOKEN).stdout
        assert "reader" in shown
        assert "executions:read, agents:read" in shown
        assert token not in shown
        (row,) = lines(run(url, "keys", "ls", "--json", REBUNO_API_KEY=TOKEN))
        assert (row["name"], row["token"]) == ("reader", "")

        (id,) = run(url, "keys", "ls", "-q", REBUNO_API_KEY=TOKEN).stdout.split()
        removed = run(url, "keys", "rm", id, id, REBUNO_API_KEY=TOKEN)
        assert removed.exit_code == 1
        assert removed.stdout == f"removed {id}\n"
        assert run(url, "exec", "ls", REBUNO_API_KEY=token).exit_code == 1
        empty = run(url, "keys", "ls", REBUNO_API_KEY=TOKEN)
        assert "There is no API key." in empty.stdout + empty.stderr


def test_a_token_alone_and_as_json() -> None:
    with EmbeddedKernel() as kernel:
        add = ("keys", "add", "n", "--scope", "agents:read")
        alone = run(kernel.url, *add, "-q").stdout
        with Client(kernel.url, alone.strip()) as client:
            assert list(client.agents()) == []
        (row,) = lines(run(kernel.url, *add, "--json"))
        with Client(kernel.url, row["token"]) as client:
            assert list(client.agents()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("add", "n"), 2, "Missing option '--scope'"),
        (("add", "n", "--scope", "all"), 1, "'all' is no scope"),
        (("rm",), 2, "Missing argument"),
        (("rm", "not-an-id"), 1, "must be a UUID"),
    ],
)
def test_keys_that_will_not_do(arguments: tuple[str, ...], code: int, word: str) -> None:
    with EmbeddedKernel() as kernel:
        result = run(kernel.url, "keys", *arguments)
        assert result.exit_code == code
        assert word in result.stderr


def test_dev_fails_what_is_late_and_deletes_what_is_old() -> None:
    with dev("--deadline", "0.2", "--retain", "1.5") as (_, url), Client(url) as client:
        client.register_agent("nobody", "http://127.0.0.1:1/", "s")
        created = client.create("nobody")
        assert created.deadline_at is not None
        ended = client.wait(created.id, timeout=30)
        assert (ended.status, ended.failure_reason) == ("failed", "deadline_exceeded")
        wait_until(lambda: list(client.list()) == [])


@pytest.mark.parametrize("option", ["--deadline", "--retain"])
def test_dev_takes_only_seconds_above_none(option: str) -> None:
    result = run("", "dev", option, "0", "--listen", "127.0.0.1:0")
    assert result.exit_code == 2
    assert "0.0 is not in the range" in result.stderr
