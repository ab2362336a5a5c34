"""The embedded kernel in a process of its own; prints its URL, ends with its standard input.

python -m benchmarks.load_kernel FILE [SECONDS-TO-RETAIN]
"""

from __future__ import annotations

import sys

from rebuno_sync.kernel import EmbeddedKernel

if __name__ == "__main__":
    retain = float(sys.argv[2]) if len(sys.argv) > 2 else None
    with EmbeddedKernel(sys.argv[1], retain=retain) as kernel:
        print(kernel.url, flush=True)
        sys.stdin.read()
