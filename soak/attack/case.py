"""One case of an attack: what is drawn for it, what it may use, and how it fails.

A case fails with one of three faults:

- WRONG: an answer that is not true. A document that was stored and is not there, or has another
  value; a consumer that was told OK and holds something else; a login that should not succeed.
- UNNAMED: data is damaged and refused, but nothing says so, or nothing says where.
- BROKEN: a process that ends by a signal or with a traceback, or something unanswered for longer
  than HANG_S.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from soak.attack.probe import NAMES, Measured, Probe, Watched
from support.server import DcpdProcess

HANG_S: Final = 10.0
"""An answer that takes longer is one that does not come, on a machine that others use as well."""


class Fault(StrEnum):
    """See the module."""

    WRONG = "wrong answer"
    UNNAMED = "unnamed damage"
    BROKEN = "crash or hang"


class Finding(NamedTuple):
    """What is wrong, in one line."""

    fault: Fault
    text: str


class AttackError(AssertionError):
    """A promise was broken; ends the case."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class NotRunError(Exception):
    """A kind cannot run on this machine; the text says why."""


class Closing(Protocol):
    """Something that several cases share."""

    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=Closing)


class Stage:
    """What cases share: the probe, and things that are made once for several of them.

    `is_short`: cases take as little time as they can.
    """

    def __init__(self, folder: Path, probe: Probe, *, is_short: bool = False) -> None:
        self.folder = folder
        self.probe = probe
        self.is_short = is_short
        self._shared: dict[str, tuple[int, Path, Closing]] = {}

    def shared(
        self, name: str, number: int, make: Callable[[Path, random.Random], Shared]
    ) -> Shared:
        """Return the thing of this name and number; made when it is another one than before.

        It is made from its number alone, in a folder of its own.
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
        """Close a shared thing; its folder goes with it, unless it is kept: then it is returned."""
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
        self.documented = ""
        """A loss that the documentation says cannot be noticed, in words."""
        self.uses: list[str] = []
        """Shared things that the case works on."""
        self.measured = Measured(dict.fromkeys(NAMES, 0.0), [])
        """What the probe has measured by now."""
        self._notes: list[str] = []

    @property
    def is_short(self) -> bool:
        return self.stage.is_short

    @property
    def words(self) -> str:
        """What was drawn, in words."""
        return ", ".join(self._notes)

    def note(self, text: str) -> None:
        """Say what was drawn."""
        self._notes.append(text)

    def seconds(self, least: float, most: float) -> float:
        """Draw a time; a short case takes the least."""
        drawn = self.draw.uniform(least, most)
        return least if self.is_short else drawn

    def watch(self, watched: Watched) -> None:
        """A server is up from now on: let the probe ask it."""
        self.rest()
        self.stage.probe.watch(watched)

    def rest(self) -> None:
        """The server may go from now on."""
        worst_s, troubles = self.stage.probe.rest()
        self.measured.troubles.extend(troubles)
        for name, seconds in worst_s.items():
            self.measured.worst_s[name] = max(self.measured.worst_s[name], seconds)

    def find(self, fault: Fault, text: str) -> None:
        """Note that something is wrong, and go on."""
        finding = Finding(fault, text)
        if finding not in self.findings:
            self.findings.append(finding)

    def demand(self, is_so: object, fault: Fault, text: str) -> None:
        """Raise AttackError unless something is so."""
        if not is_so:
            raise AttackError(fault, text)

    def share(self, name: str, cases: int, make: Callable[[Path, random.Random], Shared]) -> Shared:
        """Return a thing that so many neighbouring seeds share."""
        self.uses.append(name)
        return self.stage.shared(name, self.seed // cases, make)


class AttackedServer(DcpdProcess):
    """A server whose log is looked through for faults of the program."""

    def __init__(self, data: Path, *arguments: str) -> None:
        super().__init__(data, *arguments)
        self._looked_at = 0

    def said(self) -> str:
        """Return what the server has logged since this was asked last."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open(errors="replace") as file:
            file.seek(self._looked_at)
            text = file.read()
            self._looked_at = file.tell()
        return text

    def check(self, case: Case) -> None:
        """Demand that the server runs and has logged no fault of the program."""
        text = self.said()
        if trouble := traceback_in(text):
            case.find(Fault.BROKEN, f"the server logged a traceback: {trouble}")
        process = self._process
        if process is not None and (code := process.poll()) is not None:
            self.kill()
            raise AttackError(Fault.BROKEN, f"the server ended with {code}: {text[-400:]!r}")

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self._process is not None:
            self.kill()


def traceback_in(text: str) -> str:
    """Return the end of the first traceback in a log, "" where there is none."""
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
