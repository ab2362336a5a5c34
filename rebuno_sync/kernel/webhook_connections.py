"""The connections that webhooks go out on: an agent answers in time, or has not answered."""

from __future__ import annotations

from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from rebuno_sync.slow_peers import PromptResponse


class _Connection(HTTPConnection):
    response_class = PromptResponse


class _TLSConnection(HTTPSConnection):
    response_class = PromptResponse


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class PromptAdapter(HTTPAdapter):
    """Holds the whole head of an answer to the time-out, where others hold each byte to it."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Use our connections."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}
