"""The command ``rebuno-sync`` and what it holds."""

from __future__ import annotations

import sys
from typing import Any

import click

from rebuno_sync.cli.agents import agents
from rebuno_sync.cli.approvals import approvals
from rebuno_sync.cli.dev import dev
from rebuno_sync.cli.doctor.command import doctor
from rebuno_sync.cli.executions import executions
from rebuno_sync.cli.keys import keys
from rebuno_sync.cli.policies import policy
from rebuno_sync.cli.session import Exit, failure_of, kernel_options
from rebuno_sync.errors import RebunoError
from rebuno_sync.version import __version__


class Root(click.Group):
    """Turns the errors that are to be expected into one line and an exit code."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        for arg in args:
            try:
                arg.encode("utf-8")
            except UnicodeEncodeError:
                raise click.UsageError(f"the argument {arg!a} is not UTF-8", context) from None
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except RebunoError as exc:
            raise failure_of(exc) from exc
        except (KeyboardInterrupt, click.Abort):
            # What is half drawn on the terminal ends here.
            sys.stderr.write("\n")
            context.exit(Exit.INTERRUPTED)


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="rebuno-sync")
@kernel_options
def root() -> None:
    """Durable agents on the Rebuno protocol: a kernel to develop against, and the tools around it.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the kernel is unreachable, 4 the execution was
    cancelled.
    """


for _command in (dev, executions, approvals, agents, policy, keys, doctor):
    root.add_command(_command)
