"""An agent as a part of other WSGI apps, under gunicorn's workers: each runs to its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.integration.gunicorn_host import under_gunicorn

SECRET = "orchard-secret"
THREADS = ("--worker-class", "gthread", "--threads", "2")


@pytest.fixture(scope="module")
def kernel() -> Iterator[EmbeddedKernel]:
    with EmbeddedKernel() as kernel:
        yield kernel


@pytest.mark.parametrize(
    ("app", "agents", "where", "options"),
    [
        pytest.param("bare:app", ["one"], "bare", THREADS, id="bare"),
        pytest.param("django_project:app", ["one"], "django", THREADS, id="django"),
        # As docs/serving.md has it.
        pytest.param("django_page:app", ["shop"], "django", THREADS, id="django-page"),
        pytest.param("flask_app:app", ["one", "two"], "second", THREADS, id="flask-later-app"),
        pytest.param("flask_app:first", ["one", "two"], "first", THREADS, id="flask-earlier-app"),
        pytest.param(
            *("flask_app:create_app('made')", ["one", "two"], "made"),
            (*THREADS, "--preload", "--workers", "2"),
            id="flask-factory-preload",
        ),
        pytest.param(
            *("flask_app:app", ["one", "two"], "second", ("--worker-class", "sync")),
            id="flask-sync",
        ),
        pytest.param(
            *("django_project:app", ["one"], "django"),
            ("--worker-class", "sync", "--preload"),
            id="django-sync-preload",
        ),
        pytest.param(
            *("flask_app:create_app('made')", ["one", "two"], "made"),
            ("--worker-class", "gevent", "--workers", "2"),
            id="flask-factory-gevent",
        ),
    ],
)
def test_an_execution_of_three_steps_ends(
    kernel: EmbeddedKernel,
    tmp_path: Path,
    app: str,
    agents: list[str],
    where: str,
    options: tuple[str, ...],
) -> None:
    module, log = f"tests.integration.hosts.{app}", tmp_path / "log"
    environment = {"REBUNO_URL": kernel.url, "REBUNO_AGENT_SECRET": SECRET}
    with (
        Client(kernel.url) as client,
        under_gunicorn(module, log, "--graceful-timeout", "5", *options, **environment) as url,
    ):
        created = {}
        for agent_id in agents:
            client.register_agent(agent_id, f"{url}/agents/{agent_id}/webhook", SECRET)
            created[agent_id] = client.create(agent_id, {"name": agent_id}).id
        for agent_id, execution_id in created.items():
            found = client.wait(execution_id, timeout=60)
            assert (found.status, found.output) == (
                "completed",
                [f"HELLO {agent_id.upper()}", where],
            ), log.read_text()
            steps = client.steps(execution_id)
            assert sorted((s.target, s.status) for s in steps) == [
                ("greet", "succeeded"),
                ("shout", "succeeded"),
                ("where", "succeeded"),
            ]
        with requests.Session() as session:
            assert session.get(f"{url}/", timeout=30).text == "ordinary"
            forged = session.post(f"{url}/agents/{agents[0]}/webhook", data=b"{}", timeout=30)
            assert (forged.status_code, forged.text) == (401, "")
