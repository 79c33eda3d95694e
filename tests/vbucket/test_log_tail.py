"""What follows the last good record of a log: named by its segment, and never called unanswered if
a place outside the log says that it was answered.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memory.log_device import MemoryLogDevice, SegmentsOf
from support.stored_bytes import pack_deletion
from vbucket.check.finding import Finding, Kind
from vbucket.check.log_check import KnownEnds, LogCheck
from vbucket.log.device import SEGMENT_HEADER_BYTES
from vbucket.log.end_mark import EndMark, LogEnd, read_marks
from vbucket.log.record import RECORD_BYTES, LogDamagedError
from vbucket.log.recovery import recover
from vbucket.log.writer import LogWriter

VB = 5


def payload(seqno: int) -> bytes:
    return pack_deletion(vb_id=VB, key=b"\0k%d" % seqno, cas=seqno, seqno=seqno, rev_seqno=1)


GROUP_BYTES = RECORD_BYTES + len(payload(1))


class Log:
    """Two groups in segment 1, and `newest` groups in segment 2; all are synced and marked."""

    def __init__(self, newest: int) -> None:
        self.device = MemoryLogDevice()
        writer = LogWriter(self.device)
        for group in range(1, 3 + newest):
            if group in {1, 3}:
                writer.rotate()
            writer.append(group, payload(group))
            writer.sync()
        self.end = writer.end

    def damage(self, segment: int, at: int) -> None:
        self.device.flip(segment, at)

    def findings(self, known: KnownEnds, *, is_synced: bool = True) -> list[Finding]:
        check = LogCheck(
            SegmentsOf(self.device), known=known, high_seqnos={VB: 0},
            is_synced_per_group=is_synced,
        )  # fmt: skip
        return list(check.findings())

    def marked(self) -> KnownEnds:
        return KnownEnds(merged_segment=0, mark=read_marks(self.device.marks()))

    def cleanly_stopped(self) -> KnownEnds:
        return KnownEnds(merged_segment=0, clean_end=self.end, mark=EndMark(None, 0, "none"))

    def refusal(self, clean_end: LogEnd | None) -> str:
        with pytest.raises(LogDamagedError) as caught:
            list(recover(self.device, 0, clean_end=clean_end).groups())
        return str(caught.value)


def kinds_and_places(findings: Sequence[Finding]) -> list[tuple[Kind, str]]:
    return [(finding.kind, finding.where) for finding in findings]


@pytest.mark.parametrize("newest", [1, 2])
@pytest.mark.parametrize("is_clean", [False, True])
def test_damaged_answered_group_is_one_finding_in_its_segment(newest: int, is_clean: bool) -> None:
    """The last good record is of segment 1 if the newest segment has one group: segment 1 is
    complete all the same.
    """
    log = Log(newest)
    at = SEGMENT_HEADER_BYTES + (newest - 1) * GROUP_BYTES
    log.damage(2, at + 30)
    known = log.cleanly_stopped() if is_clean else log.marked()
    (finding,) = log.findings(known)
    assert (finding.kind, finding.where) == (Kind.LOG, "log segment 2")
    assert finding.what.startswith(f"log segment 2 is damaged at byte {at}: the log ends here with")
    assert finding.what.endswith(f"{GROUP_BYTES} bytes from {at} on are no whole group")
    assert log.refusal(log.end if is_clean else None) in finding.what


@pytest.mark.parametrize("is_clean", [False, True])
def test_a_newest_segment_that_is_gone_is_named(is_clean: bool) -> None:
    log = Log(1)
    log.device.drop_after(1)
    known = log.cleanly_stopped() if is_clean else log.marked()
    (finding,) = log.findings(known)
    assert (finding.kind, finding.where) == (Kind.LOG, "log segment 2")
    assert finding.what.startswith("log segment 2 is missing: the log ends here with group 2")
    assert log.refusal(log.end if is_clean else None) == finding.what


def test_behind_a_damaged_segment_the_mark_tells_of_answers() -> None:
    log = Log(1)
    log.damage(1, SEGMENT_HEADER_BYTES + 3)
    log.damage(2, len(log.device.read(2)) - 3)
    assert kinds_and_places(log.findings(log.marked())) == [
        (Kind.LOG, "log segment 1"), (Kind.LOG, "log segment 2"),
    ]  # fmt: skip


def test_without_mark_nothing_tells_that_tail_was_not_answered() -> None:
    log = Log(2)
    log.damage(2, len(log.device.read(2)) - 3)
    known = KnownEnds(merged_segment=0, mark=read_marks([]))
    assert kinds_and_places(log.findings(known)) == [(Kind.LOG, "log segment 2")]
    log.damage(1, SEGMENT_HEADER_BYTES + 3)
    assert kinds_and_places(log.findings(known)) == [
        (Kind.LOG, "log segment 1"), (Kind.LOG, "log segment 2"),
    ]  # fmt: skip


def test_tail_of_an_early_answering_server_is_not_unanswered() -> None:
    log = Log(2)
    known = log.marked()
    log.device.append(b"half of a group")
    assert [finding.kind for finding in log.findings(known)] == [Kind.TORN_TAIL]
    (finding,) = log.findings(known, is_synced=False)
    assert finding.kind == Kind.UNSYNCED_TAIL
    assert finding.is_harmless
    assert "answered" in finding.line()
