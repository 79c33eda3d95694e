"""Lets a process run for a slice of the time only, as on a machine that is busy with other things.

SIGSTOP and SIGCONT in turn: that needs no rights, and works wherever processes run.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Final

SLICE_S: Final = 0.02
"""How long a process runs at a time."""
SHARE: Final = 0.1
"""Which part of the time it runs."""


class Starving:
    """Starves a process until `end`, or until it is gone."""

    def __init__(self, pid: int, share: float = SHARE) -> None:
        self._pid = pid
        self._rest_s = SLICE_S / share - SLICE_S
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starving", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the process run."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                self._is_over.wait(self._rest_s)
                os.kill(self._pid, signal.SIGCONT)
                self._is_over.wait(SLICE_S)
        except ProcessLookupError:
            pass
