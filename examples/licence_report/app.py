"""A Flask app with one durable agent: which licences do the installed distributions have?

Input: ``{"names": [...], "path": "report.md"}``. Each distribution's metadata is read in a tool,
the time is stamped in a step, and the report is written in a tool that runs at most once. Kill
the worker anywhere: the execution goes on in another one, and nothing is done twice.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from importlib import metadata
from pathlib import Path

from flask import Flask

from rebuno_sync import Agent, execution, step, tool


@tool
def read_metadata(name: str) -> dict[str, str]:
    """Read a distribution's version and licence from its installed metadata."""
    note_effect("read_metadata", name)
    found = metadata.metadata(name)
    classifiers = found.get_all("Classifier") or []
    stated = [
        *(found.get_all("License-Expression") or []),
        *(c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")),
        *(text.strip().partition("\n")[0] for text in found.get_all("License") or []),
        "not stated",
    ]
    licence = next(text for text in stated if text)
    return {"name": name, "version": found["Version"], "licence": licence[:60]}


@tool(idempotency="at_most_once")
def write_report(path: str, text: str) -> int:
    """Write the report and return its size in bytes; must not happen twice."""
    note_effect("write_report", path)
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
    return Path(path).stat().st_size


def now() -> str:
    """Return the time; never the same twice, so it belongs in a step."""
    note_effect("now", "")
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def licence_report(names: list[str], path: str) -> dict[str, object]:
    """The handler: plain Python from top to bottom."""
    begun = step("begun", now)
    rows = []
    for number, name in enumerate(names):
        rows.append(read_metadata(name))
        hold_between_tools(number + 1)
    table = ["| distribution | version | licence |", "| --- | --- | --- |"]
    table += [f"| {r['name']} | {r['version']} | {r['licence']} |" for r in rows]
    text = "\n".join(["# Licences", "", f"Begun {begun}.", "", *table, ""])
    size = write_report(path, text)
    return {"distributions": len(rows), "bytes": size, "path": path}


def create_app() -> Flask:
    """The app factory that gunicorn is given; the agent is one blueprint in it."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    app = Flask(__name__)
    agent = Agent("licence-report")  # REBUNO_AGENT_SECRET and REBUNO_URL are in the environment
    agent.bind(licence_report)
    app.register_blueprint(agent.blueprint, url_prefix="/agents/licence-report")
    if os.environ.get("LICENCE_REPORT_TRACE"):
        trace_steps(Path(os.environ["LICENCE_REPORT_TRACE"]))
    return app


# What follows is for the demonstration alone: it lets demo.py see and count what happens.


def note_effect(effect: str, subject: str) -> None:
    """Leave a line behind for each time a body really ran; the demo counts them."""
    if "LICENCE_REPORT_EFFECTS" in os.environ:
        line = json.dumps({"effect": effect, "subject": subject, "pid": os.getpid()})
        with open(os.environ["LICENCE_REPORT_EFFECTS"], "a", encoding="utf-8") as file:
            file.write(line + "\n")


def hold_between_tools(done: int) -> None:
    """Stand still after so many tools, the first time, to be killed between two."""
    if done == int(os.environ.get("LICENCE_REPORT_HOLD_AFTER", "0")):
        try:
            Path(os.environ["LICENCE_REPORT_HELD"]).touch(exist_ok=False)
        except FileExistsError:
            return
        print(json.dumps({"holding": os.getpid()}), file=sys.stderr, flush=True)
        execution().cancelled.wait(30)


class _TraceFile(logging.FileHandler):
    """Writes what the SDK says about each step as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        names = ("outcome", "target", "step_id", "dispatch_attempt")
        return json.dumps(
            {"pid": record.process, **{name: getattr(record, name) for name in names}}
        )


def trace_steps(path: Path) -> None:
    """Record how each step goes, as the SDK's DEBUG log tells it."""
    handler = _TraceFile(path)
    handler.addFilter(lambda record: hasattr(record, "outcome"))
    log = logging.getLogger("rebuno_sync.context")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
