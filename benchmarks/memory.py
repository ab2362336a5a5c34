"""The peak memory of this process; imported by both SDKs' processes, so it imports neither."""

import resource
from pathlib import Path


def peak_kib() -> int:
    """Return the peak of resident memory since this program began, in KiB.

    ``ru_maxrss`` is kept across ``exec``, so it would tell of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # no such file system here
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.partition("VmHWM:")[2].split()[0])
