"""dcpctl verify: check a data folder that no server uses.

It runs the server's own check (`python -m dcp.server.check.verify`) in a child process, because
clients do not know the storage format.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from clients.cli.dcpctl import EXIT_USAGE, Target, help_text, with_target


@click.command(
    "verify",
    help=help_text(
        "Check a data folder that no server uses: the log, the database pages, whether all records"
        " agree, and the other files. Changes nothing. Exit codes: 0 nothing is wrong, 1 something"
        " is wrong, 2 it cannot be checked. docs/operations.md explains each finding.",
        "dcpctl verify dcpd-data",
        "dcpctl verify /var/lib/dcpd -o json",
    ),
)
@click.argument("folder", type=click.Path(path_type=Path))
@with_target
def verify(*, target: Target, folder: Path) -> int:
    """Check a data folder that no server uses."""
    mode = target.output_or("plain")
    if mode not in {"plain", "json"}:
        raise click.UsageError(f"verify writes plain or json output, not {mode}")
    arguments = [sys.executable, "-P", "-m", "dcp.server.check.verify", str(folder), "-o", mode]
    done = subprocess.run(arguments, check=False)  # noqa: S603 - our own program
    return done.returncode if done.returncode >= 0 else EXIT_USAGE
