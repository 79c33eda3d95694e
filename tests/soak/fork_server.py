"""Servers that start in a fraction of the time: forked from a process that has all imports.

Imports are most of a start's processor time, and a soak starts a server thousands of times. So one
process imports everything once, and each server is a fork of it that runs the same `main` with the
same arguments. From there on nothing differs: it opens, recovers and listens, starts its store
process as a program of its own, and SIGKILL ends it.

Some starts, chosen by the caller, are of the installed program, imports included.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from support.server import DcpdProcess
from vbucket.upkeep.merge import SLICE_PAGES

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

EXEC_SHARE: Final = 1 / 16
"""Share of the starts that start the program. The others fork a process that has its imports."""
_FORKS: Final = multiprocessing.get_context("forkserver")


class ForkedProcess:
    """A forked server, with the part of subprocess.Popen that DcpServer uses."""

    def __init__(self, process: ForkServerProcess, output: IO[str]) -> None:
        self._process = process
        self.stdout: IO[str] | None = output

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs; negative: the signal."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("dcpd", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedServer(DcpdProcess):
    """A dcpd process that is forked, unless `is_forked` is turned off before a start."""

    is_forked = True
    slice_pages = SLICE_PAGES
    """Of a forked server: how many pages a slice of a merge may change."""

    def _launch(self, arguments: list[str]) -> subprocess.Popen[str] | ForkedProcess:
        if not self.is_forked:
            return super()._launch(arguments)
        _FORKS.set_forkserver_preload(["soak.fork_server_imports"])
        ours, theirs = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(
            target=_serve, args=(arguments, theirs, self.log_path, self.slice_pages), daemon=True
        )
        process.start()
        theirs.close()
        with ours:
            output = os.fdopen(os.dup(ours.fileno()))
        return ForkedProcess(process, output)


def _serve(arguments: list[str], output: Connection, log_path: Path, slice_pages: int) -> None:
    """Run `dcpd` in the forked process."""
    # Ctrl-C at the terminal reaches this process. Its starter ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with output:
        os.dup2(output.fileno(), 1)
    with log_path.open("a") as log:
        os.dup2(log.fileno(), 2)
    sys.argv = ["dcpd", *arguments]
    from dcp.server.main import main
    from dcp.server.storage.process.store_process import StoreProcess

    StoreProcess.slice_pages = slice_pages
    main()
