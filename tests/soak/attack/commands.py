"""dcpctl as users run it: a process with an exit code and output."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final, NamedTuple

from tests.soak.attack.case import AttackError, Fault, traceback_in
from tests.soak.attack.probe import ROOT

TIMEOUT_S: Final = 90.0


class Told(NamedTuple):
    """The result of a command."""

    command: str
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def check(self) -> Told:
        """Require that the command succeeded."""
        if self.code:
            raise AttackError(Fault.BROKEN, f"{self.command} ended with {self.code}: {self.err!r}")
        return self

    def documents(self) -> list[dict[str, Any]]:
        """Return its JSON lines."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


def dcpctl(*arguments: object, timeout_s: float = TIMEOUT_S) -> Told:
    """Run dcpctl. A signal, a traceback or a hang is a fault."""
    words = [str(argument) for argument in arguments]
    command = "dcpctl " + " ".join(words)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "clients.cli", *words], cwd=ROOT, check=False, text=True,
            capture_output=True, timeout=timeout_s, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        text = f"{command} did not end within {timeout_s:g} s"
        raise AttackError(Fault.BROKEN, text) from error
    told = Told(command, done.returncode, done.stdout, done.stderr)
    if told.code < 0:
        raise AttackError(Fault.BROKEN, f"{command} ended by signal {-told.code}: {told.err!r}")
    if trouble := traceback_in(told.err):
        raise AttackError(Fault.BROKEN, f"{command} ended with a traceback: {trouble}")
    return told
