"""Places in an archive's history: as of a run, a time, a seqno per partition. Pure.

A run shows the server's history as it was when the run ended. So

    run N           the state at its end
    time T          of the first run that ended at or after T: what had happened by T. A change's
                    time is its CAS
    seqnos          of the newest run (or of --run N): up to there, in each partition that is named

If the archive does not hold the whole state at a point (inside a de-duplicated snapshot), the
newest whole state before it counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

from clients.backup.archive_errors import PointError
from clients.backup.archive_manifest import RunRecord
from clients.backup.legs import Placed
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX

_SECONDS: Final = re.compile(r"[0-9]{1,11}(\.[0-9]{1,9})?")


class Point(NamedTuple):
    """A point in the history; by default the end of the newest run."""

    run: int | None = None
    time_ns: int | None = None
    seqnos: Mapping[int, int] | None = None

    def runs_of(self, runs: Sequence[RunRecord]) -> list[RunRecord]:
        """Return the runs that it stands on, oldest first. Raises PointError."""
        if not runs:
            raise PointError(
                "the archive has no finished run", hint="Make one: dcpctl backup run --archive URL"
            )
        last = self._last_of(runs)
        return [record for record in runs if record.run <= last]

    def is_within(self, runs: Sequence[RunRecord]) -> bool:
        """Whether it names a run or a time in these runs, so that later runs do not matter."""
        if not runs:
            return False
        if self.run is not None:
            return self.run <= runs[-1].run
        return self.time_ns is not None and self.time_ns <= runs[-1].ended_ns

    def _last_of(self, runs: Sequence[RunRecord]) -> int:
        numbers = f"its runs are {runs[0].run} to {runs[-1].run}"
        if self.run is not None:
            if not runs[0].run <= self.run <= runs[-1].run:
                raise PointError(
                    f"the archive has no run {self.run}; {numbers}",
                    hint="dcpctl backup list --archive URL",
                )
            return self.run
        if self.time_ns is not None:
            if runs[0].base_through and self.time_ns <= runs[0].begins_ns:
                raise PointError(
                    f"the archive holds no state as of {time_text(self.time_ns)}: the runs up to"
                    f" {time_text(runs[0].begins_ns)} are folded into run {runs[0].run}",
                    hint=f"Name a later time, or the oldest run that is left: --run {runs[0].run}",
                )
            for record in runs:
                if record.ended_ns >= self.time_ns:
                    return record.run
            raise PointError(
                f"the archive knows nothing of {time_text(self.time_ns)}: its last run ended at"
                f" {time_text(runs[-1].ended_ns)}",
                hint="Make another run first, or restore the last one: leave --time out.",
            )
        return runs[-1].run


def chain_of(runs: Sequence[RunRecord], vb_id: int) -> list[Placed]:
    """Return all legs of a partition in these runs."""
    return [placed for record in runs for placed in record.placed(vb_id)]


def parse_time(text: str) -> int:
    """Return a time as Unix ns: ISO 8601 (UTC unless it says), Unix seconds. Raises PointError."""
    if _SECONDS.fullmatch(text):
        return int(Decimal(text) * 1_000_000_000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise PointError(
            f"{text!r} is no time", hint="Such as 2026-05-01T12:00:00Z, or Unix seconds."
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + moment.microsecond * 1000


def time_text(time_ns: int) -> str:
    """Return a Unix time in ns as people read it."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03}Z"


def parse_seqnos(document: Any) -> dict[int, int]:
    """Return a seqno vector: a JSON object of partition -> seqno. Raises PointError."""
    if not isinstance(document, dict):
        raise PointError("a seqno vector is a JSON object, partition -> seqno")
    found = {}
    for name, seqno in document.items():
        text = str(name)
        if not (text.isascii() and text.isdigit() and int(text) < NUM_VBUCKETS):
            raise PointError(f"{name!r} is no partition; they are 0 to {NUM_VBUCKETS - 1}")
        if not isinstance(seqno, int) or isinstance(seqno, bool) or not 0 <= seqno <= SEQNO_MAX:
            raise PointError(f"{seqno!r} is no seqno", vb_id=int(text))
        found[int(text)] = seqno
    return found
