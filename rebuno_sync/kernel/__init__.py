"""The embedded development kernel: durable executions on SQLite, in your own process.

Needs the extra ``kernel``: ``pip install 'rebuno-sync[kernel]'``.
"""

from rebuno_sync.kernel.clock import Clock
from rebuno_sync.kernel.embedded import EmbeddedKernel
from rebuno_sync.kernel.manifest import ManifestError
from rebuno_sync.kernel.schema import SchemaError
from rebuno_sync.kernel.store import StoreError

__all__ = ["Clock", "EmbeddedKernel", "ManifestError", "SchemaError", "StoreError"]
