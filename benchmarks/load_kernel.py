"""The embedded kernel in a process of its own; prints its URL, ends with its standard input."""

from __future__ import annotations

import sys

from rebuno_sync.kernel import EmbeddedKernel

if __name__ == "__main__":
    with EmbeddedKernel(sys.argv[1]) as kernel:
        print(kernel.url, flush=True)
        sys.stdin.read()
