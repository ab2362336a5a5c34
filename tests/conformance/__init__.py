"""Holds a kernel against PROTOCOL 4 to 9, from outside, over HTTP.

    pytest tests/conformance                                   # the embedded kernel
    pytest tests/conformance --kernel-url URL --kernel-token T # any other

The kernel must be able to reach this machine's loop-back interface. The agent side is written
out here by hand, on purpose: nothing of the SDK but its signatures stands between a test and
the wire. Tests that need the clock moved, a setting of the embedded kernel or a fault in it are
skipped for another one; waiting tests use short time-outs with it. ``docs/conformance.md`` has the
rows, and says which have none.
"""
