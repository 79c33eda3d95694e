"""What clients did with one key: an operation from its call to its answer, and what it found. Pure.

A value is written once only, under one key, so a value names the write that it comes from.

    WRITE     the key gets `value`
    READ      answered with `found`; None: no document
    SWAP      compare-and-set: the key gets `value` if it holds `expected`, as a read found it.
              Answered with whether it did (`found` True or False)
    ADD       the counter rises by one, from nothing to 1; answered with the new number in `found`

An operation without an answer (`returned_ns` None) may have happened at any time after its call, or
not at all. Operations that certainly changed nothing are not part of a history.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

Value = bytes | int | None


class Kind(Enum):
    """What an operation does."""

    WRITE = auto()
    READ = auto()
    SWAP = auto()
    ADD = auto()


class Operation(NamedTuple):
    """See the module."""

    kind: Kind
    called_ns: int
    returned_ns: int | None
    value: Value = None
    expected: Value = None
    found: Value = None
    cas: int = 0
    """The CAS of the answer: that of `value`, or of `found` for a read. 0: none."""
    by: str = ""
    """Who did it, for messages."""

    @property
    def is_ambiguous(self) -> bool:
        """Whether nobody knows if it happened."""
        return self.returned_ns is None

    def words(self) -> str:
        """Return it in one line."""
        end = "no answer" if self.returned_ns is None else f"{self.returned_ns / 1e9:.6f}"
        what = {
            Kind.WRITE: f"write {self.value!r}",
            Kind.READ: f"read {self.found!r}",
            Kind.SWAP: f"swap {self.expected!r} for {self.value!r}: {self.found!r}",
            Kind.ADD: f"add: {self.found!r}",
        }[self.kind]
        return f"{self.called_ns / 1e9:.6f} to {end}: {what} (cas {self.cas}, {self.by})"
