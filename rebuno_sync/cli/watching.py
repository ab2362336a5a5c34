"""Watching one execution: its story as it happens, live output, and pending approvals.

The main thread reads the events and draws. A daemon thread reads the live output, which is best
effort, and hands it to the screen under the screen's lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rebuno_sync.cli.asking import Asker
from rebuno_sync.cli.output import Output, plain, visible
from rebuno_sync.cli.session import Failure, Session
from rebuno_sync.cli.timeline import Entry, Timeline
from rebuno_sync.cli.times import clock_text, duration_text, now, parse_time
from rebuno_sync.errors import RebunoError
from rebuno_sync.live_text import LiveText
from rebuno_sync.wire import Delta, Execution

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from rebuno_sync import Client

_REOPEN_SECONDS = 1.0
_SYMBOLS = {
    "attempt": ("●", "*"),
    "recorded": ("↻", "="),
    "running": ("▸", ">"),
    "ran": ("✔", "+"),
    "failed": ("✘", "x"),
    "denied": ("⊘", "x"),
    "waiting": ("⧗", "?"),
    "decided": ("•", "-"),
    "note": ("•", "-"),
    "end": ("■", "*"),
}
_STYLES = {
    "attempt": "bold",
    "recorded": "blue",
    "running": "cyan",
    "ran": "green",
    "failed": "red",
    "denied": "red",
    "waiting": "yellow",
    "decided": "green",
    "note": "dim",
    "end": "bold green",
}


def watch_execution(
    session: Session,
    execution: Execution,
    *,
    decided_by: str | None,
    ask: bool | None,
    live: bool,
    give_up_after: float | None,
) -> Execution:
    """Draw an execution until it has ended, and return it.

    Args:
        execution: what to watch.
        decided_by: who decides approvals.
        ask: whether to ask for approvals; ``None`` for when there is a terminal.
        live: whether to show the live output of steps.
        give_up_after: how long to watch at most, in seconds.

    Raises:
        Failure: it has not ended in time.
    """
    watcher: _Lines | _Screen = _Lines(session.output) if session.json else _Screen(session.output)
    asker = None if session.json else Asker.wanted(session, decided_by, ask)
    timeline = Timeline()
    with watcher, _live_output(session.client, execution.id, watcher.delta, live):
        watcher.begin(execution, timeline)
        try:
            for event in session.client.watch(execution.id, timeout=give_up_after):
                watcher.event(plain(event), list(timeline.feed(event)))
                if event.type == "approval.requested" and asker is not None:
                    with watcher.paused():
                        asker.ask(str(event.payload.get("approval_id")))
        except TimeoutError as exc:
            raise Failure(str(exc)) from None
    ended = session.client.get(execution.id)
    watcher.end(ended)
    return ended


@contextlib.contextmanager
def _live_output(
    client: Client, execution_id: str, take: Callable[[Delta], None], wanted: bool
) -> Iterator[None]:
    """Hand over the live output while the block runs."""
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                for delta in client.stream(execution_id):
                    if stop.is_set():
                        return
                    take(delta)
            except (RebunoError, ValueError):
                pass  # an old kernel, a restart, a delta that makes no sense
            stop.wait(_REOPEN_SECONDS)

    if wanted:
        threading.Thread(target=read, name="rebuno-watch-live", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


class _Lines:
    """Writes JSON lines: each an object with one key that says what its value is."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass

    def begin(self, execution: Execution, timeline: Timeline) -> None:
        """The first event says all there is to say."""

    def event(self, event: object, entries: list[Entry]) -> None:
        with self._lock:
            self._output.record({"event": event})

    def delta(self, delta: Delta) -> None:
        with self._lock:
            self._output.record({"delta": plain(delta)})

    def end(self, execution: Execution) -> None:
        with self._lock:
            self._output.record({"execution": plain(execution)})

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Screen:
    """Draws for people: what has ended scrolls away above, what runs stays below on a terminal."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = threading.RLock()
        self._timeline = Timeline()
        self._texts: dict[str, LiveText] = {}
        self._partial: dict[str, str] = {}
        self._live = self._make_live()

    def _make_live(self) -> Live | None:
        console = self._output.console
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        from rich.live import Live

        return Live(
            console=console, transient=True, refresh_per_second=8, get_renderable=self._footer
        )

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to someone else meanwhile."""
        with self._lock:
            self.__exit__()
            try:
                yield
            finally:
                self.__enter__()

    def begin(self, execution: Execution, timeline: Timeline) -> None:
        """Say what is watched."""
        self._timeline = timeline
        self._output.line(
            ("execution ", "bold"), execution.id, ("  of ", "dim"), execution.agent_id
        )

    def event(self, event: object, entries: list[Entry]) -> None:
        """Draw what an event tells."""
        with self._lock:
            for entry in entries:
                if entry.mark == "end":
                    for step_id in list(self._partial):
                        self._flush(step_id)
                # What runs is shown below; where there is no below, it gets a line.
                if entry.mark != "running" or self._live is None:
                    self._output.console.print(self._drawn(entry), soft_wrap=True)

    def _drawn(self, entry: Entry) -> Text:
        symbol = _SYMBOLS[entry.mark][0 if self._output.unicode else 1]
        style = _STYLES[entry.mark] if entry.good or entry.mark == "denied" else "red"
        indent = "" if entry.mark in ("attempt", "end") else "  "
        took = f"  ({duration_text(entry.seconds)})" if entry.seconds is not None else ""
        return self._output.text(
            (f"{clock_text(entry.at)}  ", "dim"),
            (f"{indent}{symbol} ", style),
            (entry.text, style if entry.mark in ("attempt", "end") else ""),
            (f"  {entry.detail}" if entry.detail else "", "" if entry.good else style),
            (took, "dim"),
        )

    def delta(self, delta: Delta) -> None:
        """Draw the lines that live output completes; the rest waits below."""
        with self._lock:
            text = self._texts.setdefault(delta.step_id, LiveText()).feed(delta.seq, delta.data)
            *lines, rest = (self._partial.get(delta.step_id, "") + text).split("\n")
            for line in lines:
                self._say(delta.step_id, line)
            self._partial[delta.step_id] = rest

    def _flush(self, step_id: str) -> None:
        rest = self._partial.pop(step_id)
        if rest:
            self._say(step_id, rest)

    def _say(self, step_id: str, line: str) -> None:
        step = self._timeline.steps.get(step_id)
        bar = "│" if self._output.unicode else "|"
        name = step.target if step is not None else step_id[:12]
        self._output.line((f"{'':14}{name} {bar} ", "dim"), line.rstrip("\r"))

    def _footer(self) -> Text:
        from rich.text import Text

        with self._lock:
            # The last lines of what runs; the width of a terminal is no place for a novel.
            width = max(self._output.console.width - 4, 20)
            footer = Text(no_wrap=True, overflow="ellipsis")
            for step in list(self._timeline.running.values())[-8:]:
                began = parse_time(step.started_at)
                seconds = max((now() - began).total_seconds(), 0.0) if began else None
                spinner = _SPINNER[int(time.monotonic() * 8) % len(_SPINNER)]
                shown = spinner if self._output.unicode else ">"
                footer.append(f"{shown} ", "cyan")
                footer.append(visible(step.name))
                footer.append(f"  {duration_text(seconds)}\n", "dim")
                if partial := self._partial.get(step.step_id):
                    footer.append(f"  {visible(partial[-width:])}\n", "dim")
            footer.rstrip()
            return footer

    def end(self, execution: Execution) -> None:
        """The last event has said it."""


_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
