"""Thousands of kernels that are killed, one after the other, on one file.

A process that has the kernel imported forks a child for each life (``lives``). The child runs the
kernel without a socket, on the real file, and is killed with SIGKILL; a driver in the test's own
process plays its agents and operators (``driver``), notes what was acknowledged, and goes on with
the next life where the last one ended. ``records`` holds the log and the rows against each other.
"""
