"""Faults of the product that can be put in on purpose, to see that the checks find them.

Each is a SingleNode that does one thing in a wrong way.
"""

from __future__ import annotations

from typing import Final

from dcp.core.groups import WriteGroup
from dcp.session.answers.held_answers import HeldAnswers, HeldBatch
from dcp.stream.snapshots import Message
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.opcode import Opcode
from sim.network import Side
from sim.node import SingleNode
from sim.planting import Bug
from sim.serving import ServedConnection
from vbucket.log.device_files import FileLogDevice


class LeavesAtOnce(HeldAnswers):
    """It holds no answer."""

    def _advance(self, batch: HeldBatch) -> bool:
        return True


class AnswersBeforeSync(SingleNode):
    """It answers before the sync of what it answers with."""

    def held(self) -> HeldAnswers:
        return LeavesAtOnce(self.engine)


class StreamsBeforeSync(SingleNode):
    """Its streams show changes before they are synced."""

    def _write(self, job: WriteGroup) -> None:
        for vb_id, seqno in job.group.high_seqnos.items():
            self.engine.partitions[vb_id].committed_seqno = seqno
        self.hub.committed(job.group.high_seqnos)
        super()._write(job)


class CutsBackAtStart(SingleNode):
    """At a start it gives up the last change of every partition."""

    def _listen(self) -> None:
        super()._listen()
        if self._has_begun:
            for part in self.engine.partitions:
                if part.high_seqno > 1:
                    self.engine.keyspace.branch(part.vb_id, part.high_seqno - 1)
            self.kick()


class ForgetsAnswers(SingleNode):
    """Answers that wait for a sync leave only with those of the next group."""

    def _sync(self, job: WriteGroup) -> None:
        connections, self.connections = self.connections, {}
        super()._sync(job)
        self.connections = connections | self.connections

    def _begin_job(self) -> None:
        for connection in list(self.connections):
            connection.release()
        super()._begin_job()


class ChangedOnTheWay(ServedConnection):
    """It changes the last byte of documents that it sends to consumers."""

    def _send(self, messages: list[Message]) -> None:
        super()._send([_changed(bytes(message)) for message in messages])


def _changed(message: bytes) -> bytes:
    """Return one frame, or several in one piece."""
    changed, at = bytearray(message), 0
    while at < len(changed):
        is_document = changed[at + 1] == Opcode.DCP_MUTATION
        at += HEADER_BYTES + int.from_bytes(changed[at + 8 : at + 12], "big")
        if is_document and changed[at - 1 : at].isdigit():
            changed[at - 1 : at] = b"?"
    return bytes(changed)


class StreamsOtherValues(SingleNode):
    """Its streams show other values than its documents have."""

    def _accept(self, side: Side) -> None:
        ChangedOnTheWay(self, side)


class TrustingDevice(FileLogDevice):
    """It writes nothing again."""

    def rewrite(self, at: int, data: bytes | memoryview) -> None:
        pass


class TrustsFailedSyncs(SingleNode):
    """After a failed sync it serves what it can read of the log, and only syncs it once more."""

    device_type = TrustingDevice


BUGS: Final = {
    name: Bug(what, node=node, nodes=1)
    for name, what, node in (
        ("answers_before_sync", "a node answers before the sync", AnswersBeforeSync),
        ("streams_before_sync", "streams show changes before the sync", StreamsBeforeSync),
        ("cuts_back_at_start", "a start gives up the last change", CutsBackAtStart),
        ("forgets_answers", "answers wait for a group after theirs", ForgetsAnswers),
        ("streams_other_values", "streams show other values than documents have",
         StreamsOtherValues),
        ("trusts_failed_syncs", "what a failed sync left is served after a restart",
         TrustsFailedSyncs),
    )
}  # fmt: skip
"""Name -> the bug."""
