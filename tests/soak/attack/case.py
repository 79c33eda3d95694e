"""One case of an attack: its random numbers, what it may use, and how it fails.

A case fails with one of three faults:

- WRONG: an answer is not true. A stored document is missing or has another value; a consumer was
  told OK and holds something else; a login succeeded that should not.
- UNNAMED: data is damaged, and nothing says so, or nothing says where.
- BROKEN: a process ended by a signal or with a traceback, or something stayed unanswered for longer
  than HANG_S.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from support.server import DcpdProcess
from tests.soak.attack.probe import NAMES, Measured, Probe, Watched

HANG_S: Final = 10.0
"""A longer wait counts as a hang. The machine may be busy with other work."""


class Fault(StrEnum):
    """See the module."""

    WRONG = "wrong answer"
    UNNAMED = "unnamed damage"
    BROKEN = "crash or hang"


class Finding(NamedTuple):
    """One problem, in one line."""

    fault: Fault
    text: str


class AttackError(AssertionError):
    """A promise was broken. It ends the case."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class NotRunError(Exception):
    """A kind cannot run on this machine; the text says why."""


class Closing(Protocol):
    """Something that several cases share, and that is closed after the last of them."""

    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=Closing)


class Stage:
    """What cases share: the probe, and servers or folders that are made once for several cases.

    `is_short`: cases take as little time as possible.
    """

    def __init__(self, folder: Path, probe: Probe, *, is_short: bool = False) -> None:
        self.folder = folder
        self.probe = probe
        self.is_short = is_short
        self._shared: dict[str, tuple[int, Path, Closing]] = {}

    def shared(
        self, name: str, number: int, make: Callable[[Path, random.Random], Shared]
    ) -> Shared:
        """Return the shared thing of this name and number; make it if the number is new.

        It depends only on its number, and gets its own folder.
        """
        found = self._shared.get(name)
        if found is None or found[0] != number:
            self.drop(name)
            folder = self.folder / f"{name}-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            thing = make(folder, random.Random(f"{name} {number}"))
            self._shared[name] = found = (number, folder, thing)
        return found[2]  # type: ignore[return-value]

    def drop(self, name: str, *, keep: bool = False) -> Path | None:
        """Close a shared thing and remove its folder; with `keep` return the folder instead."""
        found = self._shared.pop(name, None)
        if found is None:
            return None
        _, folder, thing = found
        thing.close()
        if keep:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def close(self) -> None:
        """Close all that is shared."""
        for name in list(self._shared):
            self.drop(name)


class Case:
    """See the module."""

    def __init__(self, kind: str, seed: int, folder: Path, stage: Stage) -> None:
        self.kind = kind
        self.seed = seed
        self.draw = random.Random(seed)
        self.folder = folder
        self.stage = stage
        self.findings: list[Finding] = []
        self.documented: list[str] = []
        """Limits named in the documentation that the case has met."""
        self.uses: list[str] = []
        """Shared things that the case works on."""
        self.measured = Measured(dict.fromkeys(NAMES, 0.0), [])
        """What the probe has measured so far."""
        self._notes: list[str] = []

    @property
    def is_short(self) -> bool:
        return self.stage.is_short

    @property
    def words(self) -> str:
        """The case in words: what was drawn, and what happened."""
        return ", ".join(self._notes)

    def note(self, text: str) -> None:
        """Add text to `words`."""
        self._notes.append(text)

    def seconds(self, least: float, most: float) -> float:
        """Draw a duration; a short case takes the shortest."""
        drawn = self.draw.uniform(least, most)
        return least if self.is_short else drawn

    def watch(self, watched: Watched) -> None:
        """Let the probe measure a server, which must stay up until `rest`."""
        self.rest()
        self.stage.probe.watch(watched)

    def rest(self) -> None:
        """Stop the probe; then the server may go away."""
        worst_s, troubles = self.stage.probe.rest()
        self.measured.troubles.extend(troubles)
        for name, seconds in worst_s.items():
            self.measured.worst_s[name] = max(self.measured.worst_s[name], seconds)

    def find(self, fault: Fault, text: str) -> None:
        """Record a fault and continue."""
        finding = Finding(fault, text)
        if finding not in self.findings:
            self.findings.append(finding)

    def demand(self, is_so: object, fault: Fault, text: str) -> None:
        """Raise AttackError unless `is_so`."""
        if not is_so:
            raise AttackError(fault, text)

    def share(self, name: str, cases: int, make: Callable[[Path, random.Random], Shared]) -> Shared:
        """Return a shared thing: one per `cases` neighbouring seeds."""
        self.uses.append(name)
        return self.stage.shared(name, self.seed // cases, make)


class AttackedServer(DcpdProcess):
    """A server whose log is searched for tracebacks."""

    def __init__(self, data: Path, *arguments: str) -> None:
        super().__init__(data, *arguments)
        self._looked_at = 0

    def said(self) -> str:
        """Return what the server has logged since the last call."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open(errors="replace") as file:
            file.seek(self._looked_at)
            text = file.read()
            self._looked_at = file.tell()
        return text

    def check(self, case: Case) -> None:
        """Require that the server runs and has logged no traceback."""
        text = self.said()
        if trouble := traceback_in(text):
            case.find(Fault.BROKEN, f"the server logged a traceback: {trouble}")
        process = self._process
        if process is not None and (code := process.poll()) is not None:
            self.kill()
            raise AttackError(Fault.BROKEN, f"the server ended with {code}: {text[-400:]!r}")

    def close(self) -> None:
        """Kill the server if it runs."""
        if self._process is not None:
            self.kill()


def traceback_in(text: str) -> str:
    """Return the end of the first traceback in a log, "" if there is none."""
    found = [text.find(mark) for mark in ('"traceback"', "Traceback (most recent")]
    begin = min((at for at in found if at >= 0), default=-1)
    if begin < 0:
        return ""
    # In JSON it is one line; elsewhere its last line is the first that is not indented.
    line, _, rest = text[begin:].partition("\n")
    if '"traceback"' in line:
        return line.replace("\\n", " | ")[-700:]
    lines = rest.splitlines()
    last = next((n for n, one in enumerate(lines) if one[:1].strip()), len(lines) - 1)
    return " | ".join(lines[: last + 1])[-700:]
