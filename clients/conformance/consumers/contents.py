"""Scenarios about what streams carry: deletions, expiries, odd documents, large seqnos."""

from __future__ import annotations

import re
import time
from struct import Struct
from typing import Final

from clients.conformance import packet as p
from clients.conformance.consumers.proxy import Hold, Passing
from clients.conformance.consumers.scenario import scenario
from clients.conformance.consumers.stage import NotPlayedError, Stage

GROUP: Final = "contents"
_U64: Final = Struct(">Q")
_PAIR: Final = Struct(">QQ")
_REQUEST: Final = Struct(">IIQQQQQ")
_VB_SEQNO: Final = Struct(">HQ")
NO_END: Final = 2**64 - 1
BEYOND_A_DOUBLE: Final = 2**53 + 1
X_PREVIOUS_VALUE, X_SNAPSHOT_END = 0xED, 0xEE
"""Messages of dcpd's own, for consumers that ask for them."""
_BY_SEQNO: Final = frozenset(
    {
        p.MUTATION, p.DELETION, p.EXPIRATION, p.SYSTEM_EVENT, p.SEQNO_ADVANCED, X_PREVIOUS_VALUE,
        X_SNAPSHOT_END,
    }
)  # fmt: skip
"""Their extras begin with a seqno."""
_LOGS: Final = frozenset({p.DCP_FAILOVER_LOG, p.GET_FAILOVER_LOG})


@scenario(GROUP, "documents are deleted, and some of them written again")
def deletions(stage: Stage) -> None:
    """A deletion is a change with a seqno of its own. A key may come back after it."""
    stage.begin(10)
    for number in range(6):
        stage.delete(stage.key(number))
    stage.write(2)
    stage.until_same()


@scenario(GROUP, "the history has deletions before their documents were ever seen")
def deletions_in_the_history(stage: Stage) -> None:
    """The consumer gets deletions of keys that it does not have. They are no error."""
    stage.write(10)
    for number in range(5):
        stage.delete(stage.key(number))
    stage.consumer.start()
    stage.until_same()


@scenario(GROUP, "documents expire")
def expiries(stage: Stage) -> None:
    """An expiry comes as DCP_EXPIRATION where the consumer has asked for that, else as a deletion.
    The consumer does not judge the time by itself.
    """
    stage.consumer.start()
    stage.write(2)
    for number in (5, 6):
        stage.set(stage.key(number), expiry_s=1)
        stage.will_be_gone(stage.key(number))
    time.sleep(2.2)
    stage.until_same()


@scenario(GROUP, "versions that were replaced are left out of a snapshot")
def deduplicated_history(stage: Stage) -> None:
    """Seqnos have gaps, and a snapshot may end above the last change that comes."""
    for _ in range(5):
        stage.write(6)
    stage.delete(stage.key(5))
    stage.server.compact([stage.vb_id], history="0s")
    stage.consumer.start()
    stage.until_same()
    stage.write(3)
    stage.until_same()


@scenario(GROUP, "3,000 changes of one partition, then live ones")
def from_history_to_live(stage: Stage) -> None:
    """The stream goes over from what is stored to what is new without a gap and without a word."""
    for _ in range(30):
        stage.write(100)
    stage.consumer.start()
    stage.write(50, first=50)
    stage.until_same()


@scenario(GROUP, "documents of other collections are written between")
def other_collections(stage: Stage) -> None:
    """A consumer of the default collection gets nothing of them: seqnos have gaps, or
    SEQNO_ADVANCED comes. Its documents are those of the default collection.
    """
    stage.collection("POST", "other")
    stage.consumer.start()
    for turn in range(3):
        stage.write(2, first=3 * turn)
        stage.write_elsewhere("_default.other", 4)
    stage.until_same()
    stage.consumer.restart()
    stage.write_elsewhere("_default.other", 1)
    stage.write(1, first=20)
    stage.until_same()


@scenario(GROUP, "a collection is dropped, and one with the same name is made")
def collection_comes_again(stage: Stage) -> None:
    """The second one has another id, and nothing of the first. The default collection goes on."""
    stage.consumer.start()
    for _ in range(2):
        stage.collection("POST", "again")
        stage.write_elsewhere("_default.again", 2)
        stage.write(2)
        stage.until_same()
        stage.collection("DELETE", "again")
    stage.write(1, first=20)
    stage.until_same()


@scenario(GROUP, "an empty document, one of 1 MiB, a key of 200 bytes, a key that is not ASCII")
def odd_documents(stage: Stage) -> None:
    """Empty is not absent. Lengths are those of bytes, not of characters."""
    stage.consumer.start()
    stage.set("an empty one", "")
    stage.set("a large one", "abcdefgh" * (1 << 17))
    stage.set("long " * 40, "key of 200 bytes")
    stage.set("ключ", "значение")
    stage.set("json", '{"a": [1, 2, {"b": "c"}]}')
    stage.until_same()


@scenario(GROUP, "a document of 20 MiB")
def largest_document(stage: Stage) -> None:
    """The largest that there is. It is larger than many a window of flow control."""
    stage.consumer.start()
    stage.set(stage.key(0), "x" * (20 << 20))
    stage.write(2, first=1)
    stage.until_same(stage.timeout_s * 2)


@scenario(GROUP, "a document has XATTRs")
def xattrs(stage: Stage) -> None:
    """A consumer that has asked for XATTRs gets them before the value, and takes them off: the
    datatype says so. Others get the value alone.
    """
    stage.consumer.start()
    stage.set_with_xattr(stage.key(0), "value with an XATTR")
    stage.write(2, first=1)
    stage.until_same()


@scenario(GROUP, "a document with XATTRs is deleted")
def tombstone_with_xattrs(stage: Stage) -> None:
    """A deletion may have a body: its XATTRs. It deletes all the same."""
    stage.consumer.start()
    stage.set_with_xattr(stage.key(0), "value with an XATTR")
    stage.until_same()
    stage.delete(stage.key(0))
    stage.write(1, first=1)
    stage.until_same()


class Shifted:
    """A rule: all seqnos above 0 are higher by a number on the consumer's side."""

    def __init__(self, by: int) -> None:
        self._by = by

    def __call__(self, passing: Passing) -> bytes | None:
        """See Rule."""
        packet = passing.packet
        found = self._raised(packet) if passing.is_from_server else self._lowered(packet)
        return None if found is None else p.pack(found)

    def _up(self, seqno: int) -> int:
        return seqno + self._by if seqno else 0

    def _down(self, seqno: int) -> int:
        return max(0, seqno - self._by)

    def _raised(self, packet: p.Packet) -> p.Packet | None:
        opcode = packet.opcode
        if packet.is_request:
            if opcode in _BY_SEQNO:
                (seqno,) = _U64.unpack_from(packet.extras)
                return packet._replace(extras=_U64.pack(self._up(seqno)) + packet.extras[8:])
            if opcode == p.MARKER:
                return self._marker(packet)
            return None
        if packet.field == p.ROLLBACK:
            (seqno,) = _U64.unpack_from(packet.value)
            return packet._replace(value=_U64.pack(self._up(seqno)) + packet.value[8:])
        if packet.field == p.OK and (opcode in _LOGS or opcode == p.DCP_STREAM_REQ):
            pairs = _PAIR.iter_unpack(packet.value)
            log = [_PAIR.pack(uuid, self._up(seqno)) for uuid, seqno in pairs]
            return packet._replace(value=b"".join(log))
        if opcode == p.GET_ALL_VB_SEQNOS and packet.field == p.OK:
            rows = _VB_SEQNO.iter_unpack(packet.value)
            seqnos = [_VB_SEQNO.pack(vb_id, self._up(seqno)) for vb_id, seqno in rows]
            return packet._replace(value=b"".join(seqnos))
        if opcode == p.STAT and packet.key.endswith((b"seqno", b"_seqno")):
            return packet._replace(value=b"%d" % self._up(int(packet.value)))
        return None

    def _marker(self, packet: p.Packet) -> p.Packet:
        """A marker has its bounds in the extras (version 1), or with more seqnos in the value."""
        if len(packet.extras) == 20:
            bounds = [self._up(each) for each in _PAIR.unpack_from(packet.extras)]
            return packet._replace(extras=_PAIR.pack(*bounds) + packet.extras[16:])
        value = packet.value
        bounds = [self._up(each) for each in _PAIR.unpack_from(value)]
        more = [_U64.unpack_from(value, at)[0] for at in range(20, len(value) - 7, 8)]
        rest = b"".join(_U64.pack(self._up(each)) for each in more)
        return packet._replace(value=_PAIR.pack(*bounds) + value[16:20] + rest)

    def _lowered(self, packet: p.Packet) -> p.Packet | None:
        if packet.opcode != p.DCP_STREAM_REQ or len(packet.extras) != _REQUEST.size:
            return None
        flags, reserved, start, end, vb_uuid, snap_start, snap_end = _REQUEST.unpack(packet.extras)
        extras = _REQUEST.pack(
            flags, reserved, self._down(start), end if end == NO_END else self._down(end), vb_uuid,
            self._down(snap_start), self._down(snap_end),
        )  # fmt: skip
        # Our own extension names versions in the value: [["vb_uuid", "seqno"], ...].
        value = re.sub(
            rb'\["(\d+)","(\d+)"\]',
            lambda found: b'["%b","%d"]' % (found[1], self._down(int(found[2]))),
            packet.value,
        )
        return packet._replace(extras=extras, value=value)


@scenario(GROUP, "seqnos are above 2^53")
def seqnos_beyond_a_double(stage: Stage) -> None:
    """A seqno has 64 bits. A language whose numbers are doubles rounds it, and asks from a place
    that does not exist.
    """
    stage.proxy.add(Shifted(BEYOND_A_DOUBLE))
    stage.consumer.start()
    stage.write(6)  # this one's double is the next seqno's
    stage.until_same()
    stage.consumer.kill()
    stage.write(4, first=10)
    stage.consumer.start()
    stage.until_same()
    stage.branch(5)
    stage.write(1, first=20)
    stage.until_same()


class FirstComesLast:
    """A rule: the first document of each out-of-order snapshot comes as the last one of it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], bytes] = {}
        """(connection, partition) -> the document; b"" until there is one."""

    def __call__(self, passing: Passing) -> bytes | None:
        """See Rule."""
        packet, is_from_server, link = passing
        place = link.number, packet.field
        if not (is_from_server and packet.is_request):
            return None
        if packet.opcode == p.OSO_SNAPSHOT:
            is_end = place in self._held
            held = self._held.pop(place) if is_end else self._held.setdefault(place, b"")
            return held + p.pack(packet)
        if packet.opcode in _BY_SEQNO and self._held.get(place) == b"":
            self._held[place] = p.pack(packet)
            return b""
        return None


@scenario(GROUP, "a consumer of out-of-order snapshots is cut inside one")
def out_of_order_snapshot(stage: Stage) -> None:
    """Only for consumers that ask for them, of one collection. The first change comes last, so a
    part of such a snapshot is worth nothing: begin at 0 again.
    """
    stage.write(20)
    stage.proxy.add(FirstComesLast())
    hold = Hold(p.MUTATION, stage.vb_id, after=8)
    stage.proxy.add(hold)
    stage.consumer.start()
    stage.until("the consumer is inside the snapshot", hold.holds.is_set)
    exchange = stage.exchange()
    if "enable_out_of_order_snapshots" not in exchange.controls:
        raise NotPlayedError("it does not ask for out-of-order snapshots")
    if not exchange.sent[stage.vb_id].out_of_order:
        raise NotPlayedError("its streams are not of one collection, so its snapshots are in order")
    stage.proxy.cut()
    hold.let_go()
    stage.write(2, first=30)
    stage.until_same()


@scenario(GROUP, "a consumer of history streams gets every version, and some are undone")
def history_streams(stage: Stage) -> None:
    """Only for consumers that ask for them. A key comes often in one snapshot, and each time is a
    change. It is cut inside, and history branches between two versions of a key: the older one is
    there again.
    """
    for _ in range(5):
        stage.write(4)
    stage.delete(stage.key(3))
    hold = Hold(p.MUTATION, stage.vb_id, after=14)
    stage.proxy.add(hold)
    stage.consumer.start()
    stage.until("it streams", lambda: stage.exchange().sent)
    if stage.exchange().controls.get("change_streams") != "true":
        raise NotPlayedError("it does not ask for history streams")
    stage.until("the consumer is inside the snapshot", hold.holds.is_set)
    time.sleep(0.3)
    stage.proxy.cut()
    stage.branch(10)
    hold.let_go()
    stage.until_same()
    stage.write(3)
    stage.until_same()
