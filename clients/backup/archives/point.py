"""Points in an archive's history: as of a run, a time, or a seqno per partition. Pure.

A run has the server's history as of its end. So

    run N           is the state at its end
    time T          is the state at T in the first run that ended at or after T. The time of a
                    change is its CAS
    seqnos          are states in the newest run (or --run N), for the partitions that are named

If the archive does not have the complete state at a point (inside a de-duplicated snapshot), the
newest complete state before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

from clients.backup.archives.archive_errors import PointError
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.legs import Placed
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX

_SECONDS: Final = re.compile(r"[0-9]{1,11}(\.[0-9]{1,9})?")


class Point(NamedTuple):
    """A point in the history; by default the end of the newest run."""

    run: int | None = None
    time_ns: int | None = None
    seqnos: Mapping[int, int] | None = None

    def runs_of(self, runs: Sequence[RunRecord]) -> list[RunRecord]:
        """Return the runs that it needs, oldest first. Raises PointError."""
        if not runs:
            raise PointError(
                "the archive has no finished run", hint="Run: dcpctl backup run --archive URL"
            )
        last = self._last_of(runs)
        return [record for record in runs if record.run <= last]

    def check_partitions(self, vb_ids: Collection[int]) -> None:
        """Check that an archive with these partitions has the seqnos. Raises PointError.

        Seqno 0 of any partition is there: it is empty.
        """
        absent = [vb for vb, seqno in (self.seqnos or {}).items() if seqno and vb not in vb_ids]
        if absent:
            raise PointError(
                f"seqno {(self.seqnos or {})[absent[0]]} is not in the archive: it has no change of"
                " this partition", vb_id=absent[0],
                hint="dcpctl backup show --run N shows the partitions of a run.",
            )  # fmt: skip

    def is_within(self, runs: Sequence[RunRecord]) -> bool:
        """Whether it names a run or time within these runs, so later runs do not matter."""
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
                    f"the archive has no state as of {time_text(self.time_ns)}: the runs up to"
                    f" {time_text(runs[0].begins_ns)} are folded into run {runs[0].run}",
                    hint=f"Use a later time, or the oldest run: --run {runs[0].run}",
                )
            for record in runs:
                if record.ended_ns >= self.time_ns:
                    return record.run
            raise PointError(
                f"{time_text(self.time_ns)} is not in the archive: its last run ended at"
                f" {time_text(runs[-1].ended_ns)}",
                hint="Make another run first, or use the last run: leave out --time.",
            )
        return runs[-1].run


def chain_of(runs: Sequence[RunRecord], vb_id: int) -> list[Placed]:
    """Return all legs of a partition in these runs."""
    return [placed for record in runs for placed in record.placed(vb_id)]


def parse_time(text: str) -> int:
    """Parse a time to Unix ns: ISO 8601 (UTC by default) or Unix seconds. Raises PointError."""
    if _SECONDS.fullmatch(text):
        return int(Decimal(text) * 1_000_000_000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise PointError(
            f"{text!r} is not a time", hint="Use 2026-05-01T12:00:00Z or Unix seconds, for example."
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + moment.microsecond * 1000


def time_text(time_ns: int) -> str:
    """Return a Unix time in ns as ISO 8601 text."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03}Z"


def parse_seqnos(document: Any) -> dict[int, int]:
    """Return a seqno vector: a JSON object of partition -> seqno. Raises PointError.

    An object that was read with `object_pairs_hook=tuple` shows names that occur twice.
    """
    if not isinstance(document, dict | tuple):
        raise PointError("seqnos must be a JSON object: partition -> seqno")
    found: dict[int, int] = {}
    for name, seqno in document.items() if isinstance(document, dict) else document:
        text = str(name)
        if not (text.isascii() and text.isdigit() and int(text) < NUM_VBUCKETS):
            raise PointError(f"{name!r} is not a partition; use 0 to {NUM_VBUCKETS - 1}")
        if not isinstance(seqno, int) or isinstance(seqno, bool) or not 0 <= seqno <= SEQNO_MAX:
            raise PointError(f"{seqno!r} is not a seqno", vb_id=int(text))
        if int(text) in found:
            raise PointError("it is named twice in the seqnos", vb_id=int(text))
        found[int(text)] = seqno
    return found
