"""A WSGI app on a real server for the length of a test, and waiting on conditions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve ``app`` on a free port of the loop-back interface; yields its base URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wait_until(condition: Callable[[], Any], timeout: float = 30.0, what: str = "") -> Any:
    """Return the first true value of ``condition``, asked every 10 ms.

    Raises:
        TimeoutError: there was none within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what or "the condition never came true")
        time.sleep(0.01)
    return value
