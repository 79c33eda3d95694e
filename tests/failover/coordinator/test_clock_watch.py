"""A wall clock that is off is found, and one whose record came late is not."""

from __future__ import annotations

from failover.coordinator.clock import OFF_MS, ClockWatch
from failover.coordinator.records import ClockRecord
from failover.coordinator.view import Stored
from failover.metadata.metastore import KeyValue

NOW_MS = 1_800_000_000_000


class Clocks:
    """The records of members, and a node that sees them."""

    def __init__(self) -> None:
        self.watch = ClockWatch("a")
        self.records: dict[str, Stored[ClockRecord]] = {}
        self._revision = 0

    def tell(self, member: str, offset_ms: int) -> None:
        """A member writes its clock, which this node sees at NOW_MS."""
        self._revision += 1
        record = ClockRecord(member=member, unix_ms=NOW_MS + offset_ms)
        item = KeyValue(b"clock/" + member.encode(), b"", 1, self._revision, 1, 1)
        self.records[member] = Stored(record, item)
        self.watch.see(self.records, NOW_MS)

    @property
    def off(self) -> dict[str, int]:
        return self.watch.offsets_ms


def test_a_clock_that_is_ahead_is_found_at_once() -> None:
    clocks = Clocks()
    clocks.tell("b", OFF_MS + 1)
    clocks.tell("c", OFF_MS)
    clocks.tell("a", 10 * OFF_MS)
    assert clocks.off == {"b": OFF_MS + 1}, "this node's own clock is right by definition"
    clocks.tell("b", 10)
    assert clocks.off == {}


def test_clock_that_is_behind_is_found_with_second_record_in_row() -> None:
    clocks = Clocks()
    clocks.tell("b", -60 * OFF_MS)  # read with all the others at the start: it may be old
    clocks.tell("b", -OFF_MS - 1)
    assert clocks.off == {}
    clocks.watch.see(clocks.records, NOW_MS + 60 * OFF_MS)
    assert clocks.off == {}, "a record counts once"
    clocks.tell("b", -OFF_MS - 1)
    assert clocks.off == {"b": -OFF_MS - 1}
    clocks.tell("b", -10)
    assert clocks.off == {}


def test_records_that_come_late_now_and_then_say_nothing() -> None:
    clocks = Clocks()
    for _ in range(5):
        clocks.tell("b", -2)
        clocks.tell("b", -3 * OFF_MS)
    assert clocks.off == {}


def test_a_member_that_is_gone_is_forgotten() -> None:
    clocks = Clocks()
    clocks.tell("b", 2 * OFF_MS)
    del clocks.records["b"]
    clocks.watch.see(clocks.records, NOW_MS)
    assert clocks.off == {}
