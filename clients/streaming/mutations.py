"""Mutations that a consumer hands out together, and that are decoded when somebody asks. Pure.

Invariant: the bytes of a `Mutations` are those of complete and well-formed mutations of one stream,
whose order is checked (`change_runs.mutations_run`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from typing import overload

from clients.event import Event, Mutation
from clients.streaming.change_runs import (
    CAS_AT,
    DATATYPE_AT,
    EXPIRY_AT,
    FLAGS_AT,
    LOOPS,
    REV_SEQNO_AT,
    SEQNO_AT,
)


class Mutations:
    """Consecutive mutations of one partition, in order; a sequence of `Mutation`.

    Keys, values and numbers are decoded when they are asked for, each time again. So
    `state.update(mutations.items())` costs a fraction of a loop over events. The object keeps the
    bytes of the whole read (a quarter of a MiB); keys and values do not.
    """

    __slots__ = ("_at", "_count", "_data", "_skipped", "first_seqno", "last_seqno", "vb_id")

    def __init__(
        self,
        vb_id: int,
        first_seqno: int,
        last_seqno: int,
        count: int,
        place: tuple[bytes, int, int],
    ) -> None:
        """`place`: received bytes, the offset in them, and how many bytes of a key to skip."""
        assert count > 0
        self.vb_id = vb_id
        self.first_seqno = first_seqno
        self.last_seqno = last_seqno
        self._count = count
        self._data, self._at, self._skipped = place

    def __len__(self) -> int:
        """Return the number of mutations."""
        return self._count

    def __iter__(self) -> Iterator[Mutation]:
        """Yield the mutations as events."""
        return iter(self.events())

    @overload
    def __getitem__(self, index: int) -> Mutation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mutation]: ...

    def __getitem__(self, index: int | slice) -> Mutation | list[Mutation]:
        """Return a mutation, or a list of some. It decodes all: for many, keep `events()`."""
        return self.events()[index]

    def __repr__(self) -> str:
        """Name the partition and the seqnos."""
        return (
            f"Mutations(vb_id={self.vb_id}, {self._count} changes,"
            f" seqno {self.first_seqno} to {self.last_seqno})"
        )

    def events(self) -> list[Mutation]:
        """Return the mutations as events."""
        rows = LOOPS.mutation_rows(self._data, self._at, self._count, self._skipped)
        return list(starmap(Mutation, rows))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of each mutation."""
        return zip(self.keys(), self.values(), strict=True)

    def keys(self) -> list[bytes]:
        """Return the keys."""
        return LOOPS.mutation_keys(self._data, self._at, self._count, self._skipped)

    def values(self) -> list[bytes]:
        """Return the values."""
        return LOOPS.mutation_values(self._data, self._at, self._count)

    def seqnos(self) -> list[int]:
        """Return the seqnos, which rise."""
        return self._numbers(*SEQNO_AT)

    def rev_seqnos(self) -> list[int]:
        """Return the revisions."""
        return self._numbers(*REV_SEQNO_AT)

    def cas(self) -> list[int]:
        """Return the CAS values."""
        return self._numbers(*CAS_AT)

    def flags(self) -> list[int]:
        """Return the flags."""
        return self._numbers(*FLAGS_AT)

    def expiries_s(self) -> list[int]:
        """Return when the documents expire, in Unix seconds; 0: never."""
        return self._numbers(*EXPIRY_AT)

    def datatypes(self) -> list[int]:
        """Return the datatypes."""
        return self._numbers(*DATATYPE_AT)

    def _numbers(self, offset: int, width: int) -> list[int]:
        return LOOPS.mutation_numbers(self._data, self._at, self._count, offset, width)


def decoded(items: list[Event | Mutations]) -> list[Event]:
    """Return items with an event for each of the mutations."""
    events: list[Event] = []
    for item in items:
        if isinstance(item, Mutations):
            events += item.events()
        else:
            events.append(item)
    return events
