"""A kernel that knows agent ``a1``, and who may speak to it: the kernel's own fixtures."""

from tests.unit.kernel.conftest import caller, kernel, kernels, webhooks

__all__ = ["caller", "kernel", "kernels", "webhooks"]
