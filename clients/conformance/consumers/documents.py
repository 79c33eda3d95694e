"""What a consumer says that it holds, and how that differs from what the server holds.

A consumer tells its documents in one of three ways, whichever costs it least:

    a line of JSON for each event, on its standard output:
        {"op": "set", "vb": 92, "seqno": 5, "key": "a", "value": "x"}
        {"op": "delete", "vb": 92, "seqno": 6, "key": "a"}
        {"op": "rollback", "vb": 92, "seqno": 3}       what it has above that seqno is undone
    all of its documents, as one JSON object, in the file $DOCUMENTS_FILE (replaced, not rewritten)
    PUT and DELETE of $DOCUMENTS_URL/KEY, with the value as the body

Values are text. Documents of other collections than the default one are not judged.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

KEYS_SHOWN: Final = 4
_WAYS: Final = frozenset({"set", "delete", "rollback"})


class BadLineError(Exception):
    """A line of the consumer's output looks like an event and is none. The text says why."""


class Difference(NamedTuple):
    """How documents differ from those of the server."""

    lacking: tuple[str, ...]
    stale: tuple[str, ...]
    """Keys with another value."""
    extra: tuple[str, ...]
    """Keys that the server does not have."""

    @property
    def is_none(self) -> bool:
        """Whether both have the same."""
        return not (self.lacking or self.stale or self.extra)

    def __str__(self) -> str:
        """Return it in words."""
        parts = (
            ("lacks", self.lacking), ("has an old or wrong value of", self.stale),
            ("still has", self.extra),
        )  # fmt: skip
        return (
            "; ".join(f"{verb} {_listed(keys)}" for verb, keys in parts if keys) or "no difference"
        )


def difference(held: Mapping[str, str], wanted: Mapping[str, str]) -> Difference:
    """Compare a consumer's documents with those of the server."""
    return Difference(
        tuple(sorted(wanted.keys() - held.keys())),
        tuple(sorted(key for key in wanted.keys() & held.keys() if wanted[key] != held[key])),
        tuple(sorted(held.keys() - wanted.keys())),
    )


def _listed(keys: tuple[str, ...]) -> str:
    named = ", ".join(key if len(key) <= 40 else f"{key[:37]}..." for key in keys[:KEYS_SHOWN])
    more = len(keys) - KEYS_SHOWN
    return f"{len(keys)} document{'s' * (len(keys) > 1)} ({named}{', ...' * (more > 0)})"


class Documents:
    """What a consumer has told so far, in any of the three ways. Threads may share it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._events: dict[int, list[tuple[int, str, str | None]]] = {}
        """Partition -> (seqno, key, value) of its events that are not undone, in their order."""
        self._put: dict[str, str] = {}
        self.rollbacks: list[tuple[int, int]] = []
        """(partition, seqno) of the rollbacks that lines told."""
        self.told = 0
        """How many lines or requests there were."""

    def take_line(self, line: bytes) -> None:
        """Take a line of standard output; what is no JSON object with "op" is ignored.

        Raises BadLineError.
        """
        if not line.lstrip().startswith(b"{"):
            return
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return
        if "op" not in event:
            return
        self._take_event(event)

    def _take_event(self, event: dict[str, Any]) -> None:
        shown = str(event)[:120]
        if event["op"] not in _WAYS:
            raise BadLineError(f'"op" is set, delete or rollback, not {event["op"]!r}: {shown}')
        vb_id, seqno = event.get("vb"), event.get("seqno")
        if not isinstance(vb_id, int) or not isinstance(seqno, int):
            raise BadLineError(f'"vb" and "seqno" are whole numbers: {shown}')
        with self._lock:
            self.told += 1
            events = self._events.setdefault(vb_id, [])
            if event["op"] == "rollback":
                self.rollbacks.append((vb_id, seqno))
                events[:] = [each for each in events if each[0] <= seqno]
                return
            key, value = event.get("key"), event.get("value")
            if not isinstance(key, str) or (event["op"] == "set" and not isinstance(value, str)):
                raise BadLineError(f'"key" and "value" are texts: {shown}')
            if event.get("collection", "_default._default") in {"_default._default", "_default", 0}:
                events.append((seqno, key, value if event["op"] == "set" else None))

    def put(self, key: str, value: str | None) -> None:
        """Take a PUT, or a DELETE (None)."""
        with self._lock:
            self.told += 1
            if value is None:
                self._put.pop(key, None)
            else:
                self._put[key] = value

    def held(self) -> dict[str, str]:
        """Return key -> value of what the consumer has now."""
        with self._lock:
            held = self._put | _newest(self._events.values())
        try:
            document = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return held
        return {**held, **{str(key): str(value) for key, value in document.items()}}


def _newest(partitions: Iterable[list[tuple[int, str, str | None]]]) -> dict[str, str]:
    newest: dict[str, str | None] = {}
    for events in partitions:
        newest.update((key, value) for _, key, value in events)
    return {key: value for key, value in newest.items() if value is not None}
