"""What a development kernel does, as it happens: a line for each turn an execution takes."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from rebuno_sync.cli.output import Output, plain
from rebuno_sync.cli.timeline import Entry, Timeline
from rebuno_sync.cli.times import clock_text, duration_text
from rebuno_sync.errors import RebunoError
from rebuno_sync.wire import Event

if TYPE_CHECKING:
    from rebuno_sync.kernel.activity import Activity

_LOGGER = logging.getLogger("rebuno_sync")
_POLL_SECONDS = 0.2
_MAX_LOGGED = 1000
#: Of more executions at once, the oldest lose the time that they took.
_MAX_FOLLOWED = 10_000
_STYLES = {"failed": "red", "waiting": "yellow", "attempt": "cyan"}


class _Kept(logging.Handler):
    """Keeps what is logged until it is printed, the last lines of it if they are too many."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self.lines: collections.deque[str] = collections.deque(maxlen=_MAX_LOGGED)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Feed:
    """Prints on a thread of its own, so that a reader that is slow holds up nothing else.

    That goes for the kernel's log too: until the feed is stopped, warnings pass through here.

    Args:
        activity: what happens; ``None`` for the log alone.
        output: where to print it; as JSON, every event is, else the turns that people follow.
    """

    def __init__(self, activity: Activity | None, output: Output) -> None:
        self._activity = activity
        self._output = output
        self._log = _Kept()
        self._stop = threading.Event()
        self._timelines: dict[str, Timeline] = {}
        self._thread = threading.Thread(target=self._run, name="rebuno-dev-feed", daemon=True)

    def start(self) -> None:
        """Begin to print."""
        _LOGGER.addHandler(self._log)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Print what is left; tell whether that came to its end within ``timeout`` seconds."""
        self._stop.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        _LOGGER.removeHandler(self._log)
        return True

    def _run(self) -> None:
        more = True
        # Whoever read this may be gone, and the kernel may be; neither is for a trace.
        with contextlib.suppress(OSError, RebunoError):
            while more or not self._stop.wait(_POLL_SECONDS):
                more = self._print_new()
            self._print_new()

    def _print_new(self) -> bool:
        while self._log.lines:
            self._output.note(self._log.lines.popleft())
        found = [] if self._activity is None else self._activity.read()
        for agent_id, event in found:
            if self._output.json:
                self._output.record({"event": {**plain(event), "agent_id": agent_id}})
            else:
                self._tell(agent_id, event)
        return bool(found)

    def _tell(self, agent_id: str, event: Event) -> None:
        timeline = self._timelines.setdefault(event.execution_id, Timeline())
        if len(self._timelines) > _MAX_FOLLOWED:
            del self._timelines[next(iter(self._timelines))]
        if event.type == "execution.created":
            self._line(agent_id, event, "created")
        for entry in timeline.feed(event):
            if _is_turn(entry, event):
                tail = "" if entry.seconds is None else f"  ({duration_text(entry.seconds)})"
                style = "" if entry.mark == "end" and entry.good else _STYLES.get(entry.mark, "")
                self._line(agent_id, event, entry.text, style, entry.detail + tail)
            if entry.mark == "end":
                del self._timelines[event.execution_id]

    def _line(
        self, agent_id: str, event: Event, text: str, style: str = "", detail: str = ""
    ) -> None:
        self._output.line(
            (f"{clock_text(event.occurred_at)}  ", "dim"),
            f"{event.execution_id}  {agent_id}  ",
            (text, style),
            (f"  {detail.strip()}" if detail.strip() else "", "dim"),
        )


def _is_turn(entry: Entry, event: Event) -> bool:
    return not event.type.startswith("step.") and entry.mark not in ("recorded", "note")
