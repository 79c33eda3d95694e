"""How a process may end in which an allocation was made to fail."""

from __future__ import annotations

import signal
import subprocess

from dcp.compiled import compiled_modules

MYPYC_SAYS = "fatal: out of memory\n"
"""What mypyc's code says before it ends the process. Where no memory is left for a number, it
raises no MemoryError. The next start recovers, as after any other end."""


def has_ended_well(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether all checks passed, or compiled code has ended the process."""
    has_given_up = done.returncode == -signal.SIGABRT and done.stderr == MYPYC_SAYS
    return done.returncode == 0 or (has_given_up and bool(compiled_modules()))
