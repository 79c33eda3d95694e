"""Where `dcpctl watch` starts: the values of --from, and the newest changes for --last.

    beginning, now          words
    10m, 2h, 1d             that long ago
    2026-05-01T12:00:00Z    a time, UTC by default
    17                      a seqno, with one --vb
    {"17": 5} or FILE       a seqno for some partitions, as in `dcpctl backup restore --seqnos`; the
                            file may also hold the output of `dcpctl seqnos -o json`

Changes above a seqno and at or after a time are shown. Partitions that are not named start at 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from heapq import heappush, heappushpop
from itertools import count
from pathlib import Path
from typing import Any, Final

import click

from clients.consumer.options import Start
from clients.event import Deletion, Event, Mutation
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX

LAST_MAX: Final = 100_000
"""Most changes that --last shows. They are kept in memory until all partitions were read."""

_SEQNO_DIGITS_MAX: Final = len(str(SEQNO_MAX))
"""Python refuses to convert thousands of digits, and a message should not repeat them."""
_AGE: Final = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_FORMS: Final = (
    "use beginning, now, a time (2026-05-01T12:00:00Z), an age (10m, 2h, 1d), a seqno with one"
    ' --vb, or seqnos as JSON ({"17": 5}) or in a file'
)


def parse_start(text: str, vb_ids: tuple[int, ...], now: Callable[[], datetime]) -> Start:
    """Return what --from names. Raises click.UsageError."""
    if text == "beginning":
        return "beginning"
    if text == "now":
        return "now"
    if age := _AGE.fullmatch(text):
        return _ago(age[1], age[2], now())
    if text.isascii() and text.isdigit():
        if len(text) > _SEQNO_DIGITS_MAX:
            raise click.UsageError(
                f"--from has {len(text)} digits and is no seqno: the largest is {SEQNO_MAX}"
            )
        return _one_seqno(int(text), vb_ids)
    if text.lstrip().startswith("{"):
        return dict(_seqnos_of(text, "--from"))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return dict(_from_file(Path(text)))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _ago(number: str, unit: str, now: datetime) -> Start:
    try:
        return now - timedelta(**{_UNITS[unit]: int(number)})
    except OverflowError:
        return "beginning"  # before the year 1, and so before every change


def _one_seqno(seqno: int, vb_ids: tuple[int, ...]) -> Start:
    if len(vb_ids) != 1:
        raise click.UsageError(
            f"--from {seqno} is a seqno, and every partition has its own: add one --vb, or name"
            " them: --from '{\"17\": 5}'"
        )
    if seqno > SEQNO_MAX:
        raise click.UsageError(f"--from {seqno} is no seqno: the largest is {SEQNO_MAX}")
    return {vb_ids[0]: seqno}


def _from_file(path: Path) -> dict[int, int]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise click.UsageError(f"--from {str(path)!r} is no file and no time: {_FORMS}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--from {path}: {error}") from error
    return _seqnos_of(text, str(path))


def _seqnos_of(text: str, where: str) -> dict[int, int]:
    try:
        documents = [json.loads(text)]
    except (ValueError, RecursionError):
        documents = []
    try:
        if not documents:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        if documents and all(map(_is_row, documents)):
            return _checked({row["vb"]: row["high_seqno"] for row in documents}, where)
        if len(documents) == 1:
            return _checked(documents[0], where)
    except RecursionError:
        raise click.UsageError(f"{where}: the JSON is nested too deeply: {_FORMS}") from None
    except ValueError as error:
        raise click.UsageError(f"{where}: not JSON: {error}") from error
    raise click.UsageError(f'{where}: there is no {{"VB": SEQNO}} object, and no seqnos of dcpctl')


def _checked(document: Any, where: str) -> dict[int, int]:
    """Return an object of partition -> seqno. Raises click.UsageError."""
    if not isinstance(document, dict):
        raise click.UsageError(f"{where}: seqnos are a JSON object of partition and seqno")
    found = {}
    for name, seqno in document.items():
        text = str(name)
        if not (text.isascii() and text.isdigit() and int(text) < NUM_VBUCKETS):
            raise click.UsageError(
                f"{where}: {name!r} is no partition; there are 0 to {NUM_VBUCKETS - 1}"
            )
        if not isinstance(seqno, int) or isinstance(seqno, bool) or not 0 <= seqno <= SEQNO_MAX:
            raise click.UsageError(f"{where}: partition {text}: {seqno!r} is no seqno")
        found[int(text)] = seqno
    return found


def _is_row(document: Any) -> bool:
    """Whether it is a line of `dcpctl seqnos -o json`."""
    return isinstance(document, dict) and {"vb", "high_seqno"} <= document.keys()


class Newest:
    """The newest changes by CAS: the time at which the server made them."""

    def __init__(self, size: int) -> None:
        assert 0 < size <= LAST_MAX
        self._size = size
        self._heap: list[tuple[int, int, Event]] = []
        self._tie = count()

    def take(self, events: Iterable[Event]) -> None:
        """Keep the changes among some events that are newer than the oldest one kept."""
        for event in events:
            if not isinstance(event, Mutation | Deletion):
                continue
            item = (event.cas, next(self._tie), event)
            if len(self._heap) < self._size:
                heappush(self._heap, item)
            else:
                heappushpop(self._heap, item)

    def in_order(self) -> list[Event]:
        """Return them, oldest first."""
        return [event for _, _, event in sorted(self._heap, key=lambda item: item[:2])]
