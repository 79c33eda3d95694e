"""What a connection's core makes of replies, ends and pieces of packets, without a server."""

from __future__ import annotations

import pytest

from clients.errors import ConnectError, DcpdError, ServerError, TemporaryError
from clients.spark.fetch_core import Arrived, FetchCore, Stream, StreamGoneError, StreamState
from clients.spark.plan import PlanStep
from dcp.wire.frame import FrameDecoder, pack_request, pack_response
from dcp.wire.message import U32, U64, EndReason
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

VB, V1, V2 = 7, 0xA1, 0xB2
NOTHING = Arrived([], None)


class Peer:
    """A core with one stream, and the packets that a server may send to it."""

    def __init__(self, *, rollback_to: int | None = None, has_collections: bool = False) -> None:
        step = PlanStep(VB, 2, ((V1, 0),), 5, ((V2, 2), (V1, 0)), rollback_to)
        self.stream = Stream(step)
        self.core = FetchCore([self.stream], b"name", has_collections=has_collections)
        self.core.begin()

    def reply(self, status: Status, *versions: tuple[int, int], to_seqno: int | None = None):
        return self.core.receive(self.reply_of(status, *versions, to_seqno=to_seqno))

    def reply_of(self, status: Status, *versions: tuple[int, int], to_seqno: int | None = None):
        log = b"".join(U64.pack(vb_uuid) + U64.pack(began) for vb_uuid, began in versions)
        value = log if to_seqno is None else U64.pack(to_seqno) + log
        return pack_response(
            Opcode.DCP_STREAM_REQ, opaque=self.stream.opaque, status=status, value=value
        )

    def advanced(self, seqno: int) -> bytes:
        return pack_request(
            Opcode.DCP_SEQNO_ADVANCED, vb_id=VB, opaque=self.stream.opaque, extras=U64.pack(seqno)
        )

    def change(self, seqno: int, value: bytes, key: bytes = b"key") -> bytes:
        extras = U64.pack(seqno) + U64.pack(1) + bytes(15)
        return pack_request(
            Opcode.DCP_MUTATION, vb_id=VB, opaque=self.stream.opaque, extras=extras, key=key,
            value=value,
        )  # fmt: skip

    def end(self, reason: int) -> bytes:
        return pack_request(
            Opcode.DCP_STREAM_END, vb_id=VB, opaque=self.stream.opaque, extras=U32.pack(reason)
        )


def test_broken_stream_goes_on_behind_its_last_change():
    peer = Peer()
    peer.reply(Status.OK, (V2, 2), (V1, 0))
    arrived = peer.core.receive(peer.change(3, b"3") + peer.end(EndReason.STATE_CHANGED))
    assert arrived.changes is not None
    assert peer.core.is_waiting
    assert not peer.core.take_output(), "the shell pauses before it asks again"
    peer.core.retry()
    (frame,) = FrameDecoder().feed(peer.core.take_output())
    assert frame.extras[8:16] == U64.pack(3)
    assert "STATE_CHANGED" in str(peer.stream.problem)


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_copy_that_cannot_be_read_is_left(is_refused):
    """What came before counts. The last copy is asked again, or its refusal is the task's."""
    for is_last in (False, True):
        peer = Peer()
        peer.stream.is_last = is_last
        if is_refused:
            peer.reply(Status.EINTERNAL)
        else:
            peer.reply(Status.OK, (V2, 2), (V1, 0))
            arrived = peer.core.receive(peer.change(3, b"3") + peer.end(EndReason.BACKFILL_FAILED))
            assert arrived.changes is not None
            assert peer.stream.seqno == 3
        assert peer.stream.is_damaged is not is_last
        assert peer.core.moved == ([] if is_last else [peer.stream])
        assert peer.core.is_waiting is (is_last and not is_refused)
        assert isinstance(peer.core.failure, ServerError) is (is_last and is_refused)
        assert peer.core.unfinished() == [peer.stream]


def test_a_batch_never_has_two_rollback_rows_of_a_partition():
    """Told to go back to 2, then the server's deletions are gone: another attempt has to begin."""
    peer = Peer(rollback_to=2)
    arrived = peer.reply(Status.OK, (V2, 2), (V1, 0))
    assert arrived.rollbacks == [(VB, 2, V2)]
    peer.core.receive(peer.end(EndReason.STATE_CHANGED))
    peer.core.retry()
    assert peer.reply(Status.ROLLBACK, (V2, 2), (V1, 0), to_seqno=0) == NOTHING
    assert isinstance(peer.core.failure, StreamGoneError)
    assert "partition 7" in str(peer.core.failure)
    assert "repeats the task" in peer.core.failure.hint


def test_a_rollback_that_was_not_told_yet_becomes_one_to_zero():
    peer = Peer(rollback_to=2)
    assert peer.reply(Status.ROLLBACK, (V2, 2), (V1, 0), to_seqno=0) == NOTHING
    assert peer.reply(Status.OK, (V2, 2), (V1, 0)).rollbacks == [(VB, 0, V2)]


GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(30)
GONE = pack_response(Opcode.DCP_OPEN, opaque=1, status=Status.ETMPFAIL)


@pytest.mark.parametrize(("bad_end", "error"), [(GARBAGE, ConnectError), (GONE, TemporaryError)])
@pytest.mark.parametrize("has_ended", [False, True])
def test_what_came_before_error_in_same_read_is_handed_out(bad_end, error, has_ended):
    """The rollback row, the change, and only then where the next connection goes on."""
    peer = Peer(rollback_to=2)
    last = peer.end(EndReason.OK) if has_ended else peer.advanced(4)
    ok = peer.reply_of(Status.OK, (V2, 2), (V1, 0))
    arrived = peer.core.receive(ok + peer.change(3, b"3") + last + bad_end)
    assert isinstance(peer.core.failure, error)
    assert arrived.rollbacks == [(VB, 2, V2)]
    assert arrived.changes is not None
    assert arrived.changes.values.to_pylist() == [b"3"]
    assert peer.core.unfinished() == ([] if has_ended else [peer.stream])
    assert peer.stream.seqno == (3 if has_ended else 4)


@pytest.mark.parametrize("opcode", [Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_SYSTEM_EVENT])
def test_messages_that_are_cut_short(opcode):
    peer = Peer()
    peer.reply(Status.OK, (V2, 2), (V1, 0))
    peer.core.receive(pack_request(opcode, vb_id=VB, opaque=peer.stream.opaque, extras=bytes(7)))
    assert isinstance(peer.core.failure, ConnectError)
    assert "7 bytes of extras" in str(peer.core.failure)


@pytest.mark.parametrize(
    ("opcode", "extras_len", "key_len", "body_len"),
    [
        (Opcode.DCP_MUTATION, 30, 3, 40),
        (Opcode.DCP_MUTATION, 31, 10, 40),
        (Opcode.DCP_MUTATION, 31, 0, 0),
        (Opcode.DCP_DELETION, 20, 3, 40),
        (Opcode.DCP_EXPIRATION, 21, 3, 40),
        (Opcode.DCP_EXPIRATION, 20, 21, 40),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_malformed_changes_are_refused_in_words(opcode, extras_len, key_len, body_len, is_last):
    peer = Peer()
    peer.reply(Status.OK, (V2, 2), (V1, 0))
    bad = bytearray(
        pack_request(opcode, vb_id=VB, opaque=peer.stream.opaque, value=bytes(body_len))
    )
    bad[2:5] = key_len.to_bytes(2, "big") + bytes([extras_len])
    arrived = peer.core.receive(
        peer.change(3, b"3") + bytes(bad) + (b"" if is_last else peer.change(4, b"4"))
    )
    assert arrived.changes is not None, "what came before is handed out"
    assert arrived.changes.values.to_pylist() == [b"3"]
    assert isinstance(peer.core.failure, ConnectError)
    assert "malformed data" in str(peer.core.failure)
    assert f"extras of {extras_len} bytes" in str(peer.core.failure)


@pytest.mark.parametrize("key", [b"", b"\x80", b"\xff\xff\xff\xff"])
def test_a_key_without_a_collection_id_is_refused_in_words(key):
    peer = Peer(has_collections=True)
    peer.reply(Status.OK, (V2, 2), (V1, 0))
    with pytest.raises(DcpdError, match="seqno 4 has a key without a collection id") as caught:
        peer.core.receive(peer.change(3, b"3", b"\0key") + peer.change(4, b"", key))
    assert caught.value.vb_id == VB


def test_streams_of_two_connections_go_on_in_another_order():
    """Opaques of before mean nothing: 2 and 3 had those that 4 and 2 get now."""
    steps = {vb_id: PlanStep(vb_id, 0, (), 5, ((V1, 0),), None) for vb_id in (2, 3, 4)}
    streams = {vb_id: Stream(step) for vb_id, step in steps.items()}
    for group in ((2, 3), (4,)):
        before = FetchCore([streams[vb_id] for vb_id in group], b"name", has_collections=False)
        before.begin()
    core = FetchCore([streams[vb_id] for vb_id in (4, 2, 3)], b"name", has_collections=False)
    core.begin()
    for vb_id, stream in streams.items():
        log = U64.pack(V1) + U64.pack(0)
        opened = pack_response(Opcode.DCP_STREAM_REQ, opaque=stream.opaque, value=log)
        end = pack_request(
            Opcode.DCP_STREAM_END, vb_id=vb_id, opaque=stream.opaque, extras=U32.pack(0)
        )
        core.receive(opened + end)
        assert stream.state is StreamState.DONE, vb_id
    assert core.is_done


def test_packets_in_pieces_of_any_size():
    for size in (1, 7, 24, 100, 333):
        peer = Peer()
        peer.reply(Status.OK, (V2, 2), (V1, 0))
        data = b"".join(peer.change(seqno, b"x" * 70 * seqno) for seqno in (3, 4, 5))
        seen = []
        for at in range(0, len(data), size):
            changes = peer.core.receive(data[at : at + size]).changes
            if changes is not None:
                seen += changes.values.to_pylist()
        assert seen == [b"x" * 70 * seqno for seqno in (3, 4, 5)]
        peer.core.receive(peer.end(EndReason.OK))
        assert peer.core.is_done


def test_refusal_for_now_of_connection_itself_can_be_tried_again():
    peer = Peer()
    peer.core.receive(GONE)
    assert isinstance(peer.core.failure, TemporaryError)
    assert "DCP_OPEN" in str(peer.core.failure)
    assert peer.core.unfinished() == [peer.stream]
