"""A replica's side of a link, and the master's node as a test plays it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dcp.session.replication_port import ReplicationError
from dcp.wire.frame import Frame, FrameDecoder, pack_response
from dcp.wire.message import (
    StreamRequest,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.link import (
    ReplicaLink,
    from_here,
)
from failover.replication.messages import (
    NOT_SEEN,
    EntriesSection,
    Greeting,
    ReplicaPosition,
    SharedGroup,
    StoreSeen,
    Welcome,
    encode,
    pack_entries,
    pack_group,
    share,
    unpack_ack,
)
from vbucket.engine.replicated import ReplicatedChange
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import pack_mutation

EPOCH = 2
GREETING = Greeting(1, "test", "r", 1, "m")


class Replica:
    """What a link needs of its node, as numbers that the test sets."""

    def __init__(self) -> None:
        self.high = dict.fromkeys(range(4), 0)
        self.groups: dict[int, int] = {}
        self.done: list[tuple[object, ...]] = []
        self.applied_: list[tuple[int, ...]] = []
        self.refuses_welcomes = ""
        self.open_group = 7

    def store_seen(self) -> StoreSeen:
        return NOT_SEEN

    def master_serves(self, master: str, seen: StoreSeen) -> None:
        self.done.append(("serves", master, seen))

    def position(self, vb_id: int, epoch: int) -> tuple[StreamRequest, ReplicaPosition]:
        return from_here(self.high[vb_id], 77), ReplicaPosition(epoch, [("77", "0", 1)])

    def welcomed(self, vb_id: int, welcome: Welcome) -> None:
        if self.refuses_welcomes:
            raise ReplicationError(self.refuses_welcomes)
        self.done.append(("welcomed", vb_id, welcome.epoch))

    def roll_back(self, vb_id: int, epoch: int, seqno: int, shared_seqno: int) -> None:
        self.done.append(("rolled back", vb_id, epoch, seqno))
        self.high[vb_id] = min(seqno, self.high[vb_id])

    def high_seqno(self, vb_id: int) -> int:
        return self.high[vb_id]

    def incomplete_snapshot(self, vb_id: int) -> SnapshotWindow | None:
        return None

    def apply(self, section: EntriesSection) -> None:
        self.done.append(("applied", section.vb_id, len(section.entries)))
        self.high[section.vb_id] += len(section.entries)

    def applied(self, vb_ids: Iterable[int]) -> None:
        self.applied_ += [tuple(vb_ids)]

    def unsynced_group(self, vb_id: int) -> int:
        return self.groups.get(vb_id, 0)

    def apply_group(
        self, payload: bytes, highs: dict[int, int], epochs: dict[int, int], body_bytes_max: int
    ) -> None:
        """Leave it to Python."""

    def apply_changes(self, changes: Sequence[ReplicatedChange]) -> int:
        for change in changes:
            self.high[change[0]] += 1
        return self.open_group

    def committed(self, seqnos: Mapping[int, int], *, is_synced: bool) -> None:
        self.done.append(("committed", dict(seqnos)))


class Line:
    """A link, what it sent, and the master's node as the test plays it."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.side = Replica()
        self.link = ReplicaLink(self.side, GREETING, now_ns=0, value_bytes_max=1000)
        self.now_ns = 0
        self.number = 0
        self._decoder = FrameDecoder()
        if is_ready:
            self.sent()
            self.answer(Opcode.DCP_OPEN)
            self.answer(Opcode.DCP_CONTROL)

    def sent(self) -> list[Frame]:
        return self._decoder.feed(self.link.bytes_to_send())

    def receive(self, data: bytes) -> None:
        self.link.receive(data, self.now_ns)

    def answer(
        self, opcode: int, status: int = Status.OK, *, opaque: int = 0, value: bytes = b""
    ) -> None:
        self.receive(pack_response(opcode, status, opaque=opaque, value=value))

    def requests(self) -> list[Frame]:
        """The stream requests that were sent."""
        return [frame for frame in self.sent() if frame.opcode == Opcode.DCP_STREAM_REQ]

    def acks(self) -> list[tuple[int, int]]:
        return [unpack_ack(f.extras)[:2] for f in self.sent() if f.opcode == Opcode.X_REPLICA_ACK]

    def ask(self, vb_id: int, epoch: int = EPOCH) -> int:
        """Follow a partition; return the opaque of the request."""
        self.link.follow(vb_id, epoch, self.now_ns)
        [request] = self.requests()
        assert request.vb_id == vb_id
        return request.opaque

    def welcome(self, opaque: int, epoch: int = EPOCH) -> None:
        value = encode(Welcome(epoch, [("77", "0", 1)], 0, 0, 0))
        self.answer(Opcode.DCP_STREAM_REQ, opaque=opaque, value=value)

    def follow(self, vb_id: int) -> int:
        opaque = self.ask(vb_id)
        self.welcome(opaque)
        return opaque

    def message(self, *sections: EntriesSection, number: int | None = None) -> None:
        self.number = self.number + 1 if number is None else number
        self.receive(pack_entries(self.number, self.number + 100, sections))

    def group(self, opened: int, group: SharedGroup, committed: tuple[int, int] = (0, 0)) -> None:
        self.number += 1
        pieces = pack_group(self.number, self.number + 100, opened, committed, group)
        self.receive(b"".join(pieces))


def entries(vb_id: int, opaque: int, *seqnos: int, epoch: int = EPOCH) -> EntriesSection:
    return EntriesSection(
        vb_id, opaque, epoch, 0,
        [
            pack_mutation(vb_id=vb_id, key=b"\0k", value=b"", cas=1, seqno=seqno, rev_seqno=1)
            for seqno in seqnos
        ],
    )  # fmt: skip


def shared(*seqnos: int) -> SharedGroup:
    """A whole group with changes of vb 1."""
    return share(
        b"".join(
            pack_mutation(
                vb_id=1, key=b"\0k", value=b"", cas=1, seqno=seqno, rev_seqno=1, epoch=EPOCH
            )
            for seqno in seqnos
        )
    )
