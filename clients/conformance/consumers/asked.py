"""What a consumer asked and was answered, and which known mistake that shows. Sans-IO.

It reads the packets that the proxy noted. A mistake is named only where packets or documents show
it; what remains is told as it is: the difference, and the last packets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Final, NamedTuple

from clients.conformance import packet as p
from clients.conformance.consumers.documents import Difference
from clients.conformance.consumers.proxy import Noted

_REQUEST: Final = Struct(">IIQQQQQ")
_DOCUMENTS: Final = frozenset({p.MUTATION, p.DELETION, p.EXPIRATION})
DCP_LAST: Final = 0x67
"""Opcodes of DCP are DCP_OPEN to this."""
PACKETS_SHOWN: Final = 12
_OSO_BEGIN: Final = 1


class Asked(NamedTuple):
    """A stream request and its answer."""

    at_s: float
    vb_id: int
    start: int
    vb_uuid: int
    snap_start: int
    snap_end: int
    status: int | None
    """None: it was not answered."""
    rollback_seqno: int | None
    connection: int


class Sent(NamedTuple):
    """What a consumer got of a partition: the snapshots, and the seqnos of changes."""

    snapshots: list[tuple[float, int, int]]
    seqnos: list[tuple[float, int]]
    out_of_order: list[tuple[float, int]]
    """(when, flags) of OSO_SNAPSHOT: such a snapshot begins (1) or is complete (2)."""


class Exchange:
    """The packets of a scenario, read."""

    def __init__(self, noted: Iterable[Noted]) -> None:
        self.noted = tuple(noted)
        self.asked: list[Asked] = []
        self.ends: list[tuple[float, int, int]] = []
        """(when, partition, reason) of streams that the server ended."""
        self.sent: dict[int, Sent] = {}
        self.acknowledged = 0
        """Bytes, by BUFFER_ACK."""
        self.sent_bytes = Counter[int]()
        """Connection -> bytes of DCP that the server has sent on it."""
        self.controls: dict[str, str] = {}
        open_requests: dict[tuple[int, int], int] = {}
        for each in self.noted:
            self._take(each, open_requests)

    def _take(self, each: Noted, open_requests: dict[tuple[int, int], int]) -> None:
        packet, opcode = each.packet, each.packet.opcode
        if each.is_from_server:
            self._take_from_server(each, open_requests)
        elif opcode == p.DCP_STREAM_REQ and len(packet.extras) == _REQUEST.size:
            _, _, start, _, vb_uuid, snap_start, snap_end = _REQUEST.unpack(packet.extras)
            open_requests[each.connection, packet.opaque] = len(self.asked)
            self.asked.append(
                Asked(
                    each.at_s, packet.field, start, vb_uuid, snap_start, snap_end, None, None,
                    each.connection,
                )
            )  # fmt: skip
        elif opcode == p.BUFFER_ACK and len(packet.extras) == 4:
            self.acknowledged += int.from_bytes(packet.extras, "big")
        elif opcode == p.CONTROL:
            self.controls[packet.key.decode("latin-1")] = packet.value.decode("latin-1")

    def _take_from_server(self, each: Noted, open_requests: dict[tuple[int, int], int]) -> None:
        packet, opcode = each.packet, each.packet.opcode
        if packet.is_request and opcode >= p.DCP_OPEN:
            self.sent_bytes[each.connection] += each.size
        if opcode == p.DCP_STREAM_REQ and not packet.is_request:
            index = open_requests.pop((each.connection, packet.opaque), None)
            if index is not None:
                is_rollback = packet.field == p.ROLLBACK and len(packet.value) >= 8
                seqno = int.from_bytes(packet.value[:8], "big") if is_rollback else None
                self.asked[index] = self.asked[index]._replace(
                    status=packet.field, rollback_seqno=seqno
                )
        elif opcode == p.STREAM_END and len(packet.extras) == 4:
            self.ends.append((each.at_s, packet.field, int.from_bytes(packet.extras, "big")))
        elif opcode == p.MARKER:
            fields = packet.extras if len(packet.extras) >= 16 else packet.value
            start, end = (int.from_bytes(fields[at : at + 8], "big") for at in (0, 8))
            self._of(packet.field).snapshots.append((each.at_s, start, end))
        elif opcode == p.OSO_SNAPSHOT and len(packet.extras) == 4:
            flags = int.from_bytes(packet.extras, "big")
            self._of(packet.field).out_of_order.append((each.at_s, flags))
        elif opcode in _DOCUMENTS:
            seqno = int.from_bytes(packet.extras[:8], "big")
            self._of(packet.field).seqnos.append((each.at_s, seqno))

    def _of(self, vb_id: int) -> Sent:
        return self.sent.setdefault(vb_id, Sent([], [], []))

    def after(self, asked: Asked) -> Asked | None:
        """Return the next request for the same partition."""
        return next(
            (each for each in self.asked if each.vb_id == asked.vb_id and each.at_s > asked.at_s),
            None,
        )

    def rollbacks(self) -> list[Asked]:
        """Return the requests that were answered with ROLLBACK."""
        return [each for each in self.asked if each.rollback_seqno is not None]

    def last_packets(self, vb_id: int) -> list[str]:
        """Return the newest packets of DCP about a partition, decoded, oldest first."""
        answers = {
            (each.connection, each.packet.opaque)
            for each in self.noted
            if not each.is_from_server and each.packet.field == vb_id
        }
        chosen = [
            each
            for each in self.noted
            if p.DCP_OPEN <= each.packet.opcode <= DCP_LAST
            and (
                each.packet.field == vb_id
                if each.packet.is_request
                else (each.connection, each.packet.opaque) in answers
            )
        ][-PACKETS_SHOWN:]
        return [
            f"{'server  ' if each.is_from_server else 'consumer'} {each.packet}" for each in chosen
        ]


class Evidence(NamedTuple):
    """What a mistake is looked for in."""

    exchange: Exchange
    difference: Difference
    seqnos: dict[str, tuple[int, int]]
    """Key -> (partition, seqno) of the document that the server has, or of the one undone."""
    ended: str
    """How the process ended; "" if it runs."""
    noops_unanswered: int
    partitions: int
    """How many the server has."""
    deleted: frozenset[str]
    """Keys that were deleted or have expired."""
    undone: frozenset[str]
    """Keys whose newest value was undone."""


def _ended(of: Evidence) -> str:
    return f"it ended: {of.ended}" if of.ended else ""


def _left_noops(of: Evidence) -> str:
    if of.noops_unanswered:
        return "it does not answer NOOPs, so a server takes it for dead and cuts the connection"
    return ""


def _never_went_back(of: Evidence) -> str:
    for asked in of.exchange.rollbacks():
        later = of.exchange.after(asked)
        assert asked.rollback_seqno is not None
        if later is None:
            return (
                f"after ROLLBACK to {asked.rollback_seqno} it did not ask for partition"
                f" {asked.vb_id} again"
            )
        if later.start > asked.rollback_seqno:
            return (
                f"it ignores ROLLBACK: sent back to {asked.rollback_seqno} in partition"
                f" {asked.vb_id}, it asked again from {later.start}"
            )
    return ""


def _named_inside_as_whole(of: Evidence) -> str:
    sent_back = {(each.vb_id, each.rollback_seqno) for each in of.exchange.rollbacks()}
    for asked in of.exchange.asked:
        sent = of.exchange.sent.get(asked.vb_id)
        if sent is None or not asked.start or asked.snap_end != asked.start:
            continue
        if (asked.vb_id, asked.start) in sent_back:
            continue  # the server's own place, where a version of its history ends
        before = [each for each in sent.snapshots if each[0] < asked.at_s]
        if before and before[-1][1] <= asked.start < before[-1][2]:
            _, start, end = before[-1]
            return (
                f"it saves positions inside a snapshot as if that were complete: it asked for"
                f" partition {asked.vb_id} from {asked.start} with snapshot {asked.snap_start} to"
                f" {asked.snap_end}, and that seqno is inside snapshot {start} to {end}"
            )
    return ""


def _inside_out_of_order(of: Evidence) -> str:
    for asked in of.exchange.asked:
        sent = of.exchange.sent.get(asked.vb_id, Sent([], [], []))
        before = [flags for at_s, flags in sent.out_of_order if at_s < asked.at_s]
        if asked.start and before and before[-1] == _OSO_BEGIN:
            return (
                f"it goes on inside an out-of-order snapshot: it asked for partition {asked.vb_id}"
                f" from {asked.start} with a part of it, and any change below may be lacking"
            )
    return ""


def _rounded(of: Evidence) -> str:
    for asked in of.exchange.asked:
        sent = of.exchange.sent.get(asked.vb_id)
        if asked.start <= 2**53 or sent is None:
            continue
        known = {seqno for _, seqno in sent.seqnos} | {end for _, _, end in sent.snapshots}
        if asked.start not in known and float(asked.start) == asked.start:
            return (
                f"it rounds seqnos: it asked from {asked.start}, which no change or snapshot had"
                " (a double has 53 bits; use 64-bit whole numbers)"
            )
    return ""


def _no_return_after_end(of: Evidence) -> str:
    for at_s, vb_id, reason in of.exchange.ends:
        if reason != 0 and not any(
            each.vb_id == vb_id and each.at_s > at_s for each in of.exchange.asked
        ):
            return (
                f"it does not come back after STREAM_END: the stream of partition {vb_id} ended"
                f" with reason {reason}, and was not asked for again"
            )
    return ""


def _another_number(of: Evidence) -> str:
    beyond = sorted({each.vb_id for each in of.exchange.asked if each.vb_id >= of.partitions})
    if not beyond:
        return ""
    return (
        f"it does not take the number of partitions from the map: it asked for partition"
        f" {beyond[0]}, and the server has {of.partitions}, 0 to {of.partitions - 1}"
    )


def _old_version(of: Evidence) -> str:
    refused: dict[tuple[int, int, int], int] = {}
    for asked in of.exchange.asked:
        if asked.status not in {None, p.OK}:
            place = asked.vb_id, asked.start, asked.vb_uuid
            refused[place] = refused.get(place, 0) + 1
    for (vb_id, start, _), times in refused.items():
        if times > 100:
            return (
                f"it asks the same again: {times} requests for partition {vb_id} from {start} were"
                " refused, and nothing in them changed"
            )
    return ""


def _skipped_new_history(of: Evidence) -> str:
    for key in of.difference.lacking + of.difference.stale:
        vb_id, seqno = of.seqnos.get(key, (-1, 0))
        for asked in of.exchange.rollbacks():
            assert asked.rollback_seqno is not None
            if asked.vb_id == vb_id and asked.rollback_seqno < seqno <= asked.start:
                return (
                    f"it skips changes of the new history: {key!r} has seqno {seqno}, between the"
                    f" rollback to {asked.rollback_seqno} and its old position {asked.start}"
                )
    return ""


def _kept_undone(of: Evidence) -> str:
    wrong = set(of.difference.extra + of.difference.stale)
    if of.exchange.rollbacks() and (kept := sorted(wrong & of.undone)):
        return (
            f"it goes back in the stream and keeps what the server has undone: {kept[0]!r} and"
            f" {len(kept) - 1} more"
        )
    return ""


def _kept_deleted(of: Evidence) -> str:
    if kept := sorted(set(of.difference.extra) & of.deleted):
        from_0 = any(each.rollback_seqno == 0 for each in of.exchange.rollbacks())
        return f"it keeps {kept[0]!r} and {len(kept) - 1} more, which " + (
            "were gone before it began again at 0: a rollback to 0 empties the partition first"
            if from_0
            else "were deleted or have expired"
        )
    return ""


def _never_acknowledged(of: Evidence) -> str:
    window = of.exchange.controls.get("connection_buffer_size", "")
    most = max(of.exchange.sent_bytes.values(), default=0)
    if window.isdigit() and 0 < int(window) <= most and not of.exchange.acknowledged:
        return (
            f"it never acknowledges bytes (BUFFER_ACK), and asked for a window of {window}: the"
            f" server stopped after {most:,}"
        )
    return ""


MISTAKES: Final[tuple[Callable[[Evidence], str], ...]] = (
    _ended, _another_number, _never_went_back, _named_inside_as_whole, _inside_out_of_order,
    _rounded, _left_noops,
    _no_return_after_end, _never_acknowledged, _skipped_new_history, _kept_undone, _kept_deleted,
    _old_version,
)  # fmt: skip
"""What is looked for, the surest first. Each returns a sentence, or ""."""


def mistake(of: Evidence) -> str:
    """Return the mistake that the evidence shows, "" if it shows none that is known."""
    return next(filter(None, (look(of) for look in MISTAKES)), "")


def told(of: Evidence, vb_id: int, why: str) -> list[str]:
    """Return the lines of a report: the mistake, what was waited for, the difference, packets."""
    lines = [line for line in (mistake(of), why) if line]
    if not of.difference.is_none:
        lines.append(f"at the end it {of.difference}")
    if packets := of.exchange.last_packets(vb_id):
        lines.append(f"the last packets about partition {vb_id}:")
        lines += [f"  {each}" for each in packets]
    return lines
