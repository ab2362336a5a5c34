"""Our SDK beside the official one, in one run on one machine.

    python -m benchmarks [--rounds N] [--steps N] [--executions N] [--crowd N] [--json FILE]

Both run the same handler in a process of their own, on the server that comes with each, against
one loop-back kernel that answers at once. The rounds are interleaved and the median is taken, so
that what else the machine does hits both. Without the official SDK ours is measured alone. Then
come the first byte of streamed LLM calls, recorded and bare, many executions on one embedded
kernel, and many at once on one gunicorn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import crowd, llm, load
from benchmarks.processes import AgentProcess, Kernel, RawSocket, start
from benchmarks.stages import stages
from rebuno_sync.version import __version__
from tests.peers import VERSIONS, PeerUnavailable, peer_python

OFFICIAL = VERSIONS[0]
#: At most this share of the official SDK's time per step, and per replayed step.
TARGET = 0.45
_IMPORT = {"ours": "import rebuno_sync", "official": "import rebuno"}
_READY = {
    "ours": "from rebuno_sync import Agent, tool, step\n"
    "a = Agent('a', secret='s', base_url='http://k'); a.bind(lambda x: x); a.app",
    "official": "from rebuno import Agent, tool, step\n"
    "a = Agent('a', secret='s', base_url='http://k'); a.bind(lambda x: x); a.app",
}
_NAMES = {
    "step": "one step (µs)",
    "replayed_step": "one replayed step (µs)",
    "raw_pair": "two raw round trips, one socket (µs)",
    "webhook": "webhook acknowledged (µs)",
    "import": "import (ms above a bare interpreter)",
    "ready": "import, agent made, app built (ms above bare)",
    "peak_import": "peak memory after import (MiB)",
    "peak_agent": "peak memory of the agent process (MiB)",
}


def measure(rounds: int, steps: int, console: Console) -> dict[str, Any]:
    """Run everything and return the medians."""
    pythons = {"ours": sys.executable}
    try:
        pythons["official"] = peer_python(OFFICIAL)
    except PeerUnavailable as exc:
        console.print(f"[yellow]rebuno=={OFFICIAL} cannot be had, ours runs alone:[/] {exc}")
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _NAMES}

    def note(what: str, who: str, value: float) -> None:
        samples[what].setdefault(who, []).append(value)

    with contextlib.ExitStack() as stack:
        kernel = Kernel()
        stack.callback(kernel.close)
        raw = RawSocket(kernel)
        stack.callback(raw.close)
        agents = {}
        for who, python in pythons.items():
            module = "our_agent" if who == "ours" else "official_agent"
            agents[who] = AgentProcess(python, module, kernel)
            stack.callback(agents[who].close)
        with console.status("measuring steps and webhooks"):
            for agent in agents.values():
                agent.dispatch(steps)
                agent.dispatch(steps, replay=True)
            for _ in range(rounds):
                note("raw_pair", "raw", raw.seconds_per_pair(steps) * 1e6)
                for replay, what in ((False, "step"), (True, "replayed_step")):
                    for who, agent in agents.items():
                        _, output = agent.dispatch(steps, replay=replay)
                        note(what, who, output["seconds"] / steps * 1e6)
                        note("peak_agent", who, output["peak_rss"] / 1024)
                for _ in range(20):
                    for who, agent in agents.items():
                        note("webhook", who, agent.dispatch(0)[0] * 1e6)
        with console.status("measuring where the time goes"):
            parts = stages(kernel.url, steps, rounds)
    with console.status("measuring imports"):
        for _ in range(rounds):
            for who, python in pythons.items():
                bare = start(python, "pass")[0]
                seconds, peak = start(python, _IMPORT[who])
                note("import", who, (seconds - bare) * 1e3)
                note("peak_import", who, peak / 1024)
                note("ready", who, (start(python, _READY[who])[0] - bare) * 1e3)
    peaks = {who: [max(values)] for who, values in samples["peak_agent"].items()}
    samples["peak_agent"] = peaks
    return {
        "versions": {
            "ours": __version__,
            "official": OFFICIAL,
            "python": platform.python_version(),
        },
        "rounds": rounds,
        "steps": steps,
        "medians": {
            what: {who: statistics.median(values) for who, values in by.items()}
            for what, by in samples.items()
        },
        "stages": {name: seconds * 1e6 for name, seconds in parts.items()},
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print the results as tables."""
    versions, medians = results["versions"], results["medians"]
    table = Table(title=f"medians of {results['rounds']} interleaved rounds")
    table.add_column("")
    table.add_column(f"rebuno-sync {versions['ours']}", justify="right")
    table.add_column(f"rebuno {versions['official']}", justify="right")
    table.add_column("ratio", justify="right")
    for what, name in _NAMES.items():
        by = medians[what]
        if "raw" in by:
            table.add_row(name, f"{by['raw']:.0f}", "", "")
            continue
        ours, official = by["ours"], by.get("official")
        if official is None:
            table.add_row(name, _figure(ours), "not there", "")
            continue
        ratio = ours / official
        text = f"{ratio:.2f}"
        if what in ("step", "replayed_step"):
            text += " [green]≤[/]" if ratio <= TARGET else " [red]>[/]"
            text += f" {TARGET}"
        table.add_row(name, _figure(ours), _figure(official), text)
    console.print(table)
    total = medians["step"]["ours"]
    parts = Table(title=f"where the {total:.0f} µs of one step of ours go")
    parts.add_column("")
    parts.add_column("µs", justify="right")
    parts.add_column("share", justify="right")
    rest = total - sum(results["stages"].values())
    for name, spent in (*results["stages"].items(), ("everything else", rest)):
        parts.add_row(name, f"{spent:.0f}", f"{spent / total:.0%}")
    console.print(parts)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def main() -> int:
    """Measure, show, and write the JSON that was asked for; 1 when a load found a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument(
        "--steps", type=int, default=400, help="steps a handler takes (default 400)"
    )
    parser.add_argument(
        "--calls", type=int, default=300, help="LLM calls of each kind (default 300)"
    )
    parser.add_argument(
        "--executions", type=int, default=2000, help="how many the load has; 0 for none"
    )
    parser.add_argument(
        "--crowd", type=int, default=500, help="how many are under way at once; 0 for none"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    given = parser.parse_args()
    console = Console()
    results = measure(given.rounds, given.steps, console)
    show(results, console)
    with console.status("measuring the first byte of LLM calls"):
        results["llm"] = llm.first_byte(given.calls)
    llm.show(results["llm"], console)
    if given.executions:
        found = load.run(given.executions, console)
        load.show(found, console)
        results["load"] = load.as_json(found)
    if given.crowd:
        many = crowd.run(given.crowd, crowd.ROUNDS, console)
        crowd.show(many, console)
        results["crowd"] = crowd.as_json(many)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if any(results.get(name, {}).get("faults") for name in ("load", "crowd")) else 0


if __name__ == "__main__":
    sys.exit(main())
