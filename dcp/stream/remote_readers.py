"""Streams that replicas serve, as the master of their partitions knows them. Pure.

Once a second a replica's node says how far its streams let floors rise (`held_by`). The master's
floors wait for these as for its own streams (`dcp.core.floors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dcp.stream.active_stream import ActiveStream
from vbucket.model.ids import SEQNO_MAX


class Held(NamedTuple):
    """How far a partition's floors may rise without taking anything from a node's streams of it."""

    next_seqno: int
    """Of the stream that allows the least."""
    floor_max: int
    purge_max: int


def held_by(streams: Iterable[ActiveStream]) -> Held | None:
    """Return what streams of one partition hold; None: nothing."""
    each = list(streams)
    if not each:
        return None
    first = min(each, key=lambda stream: stream.purge_max)
    held = Held(first.next_seqno, min(stream.floor_max for stream in each), first.purge_max)
    return held if min(held.floor_max, held.purge_max) < SEQNO_MAX else None


class RemoteReader:
    """The streams of a partition that a replica's node serves, as one."""

    __slots__ = ("floor_max", "is_left_behind", "next_seqno", "purge_max", "vb_id")

    def __init__(self, vb_id: int, held: Held) -> None:
        self.vb_id = vb_id
        self.next_seqno, self.floor_max, self.purge_max = held
        self.is_left_behind = False
        """Whether nobody waits for it any more: it stood still for too long."""

    def take(self, held: Held) -> None:
        """Take how far it is now."""
        self.is_left_behind &= held.next_seqno == self.next_seqno
        self.next_seqno, self.floor_max, self.purge_max = held


class RemoteReaders:
    """By member, the streams that it serves of partitions whose master this node is."""

    def __init__(self) -> None:
        self._readers: dict[str, dict[int, RemoteReader]] = {}

    def of(self, vb_id: int) -> Iterator[RemoteReader]:
        """Return those of a partition that floors wait for."""
        for readers in self._readers.values():
            reader = readers.get(vb_id)
            if reader is not None and not reader.is_left_behind:
                yield reader

    def take(self, member: str, held: Mapping[int, Held]) -> None:
        """Take all that a member's streams hold now."""
        before = self._readers.get(member, {})
        self._readers[member] = now = {}
        for vb_id, each in held.items():
            now[vb_id] = reader = before.get(vb_id) or RemoteReader(vb_id, each)
            reader.take(each)

    def lost(self, member: str) -> None:
        """The member's node is not connected any more: its streams end without its master."""
        self._readers.pop(member, None)
