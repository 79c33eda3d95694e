"""What DCP streams send from any position, read frame by frame on one connection.

`clients.consumer.Consumer` retries a stream that fails. Here each partition is requested once, and
the outcome is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dcp.wire.frame import Frame
from dcp.wire.message import (
    EndReason,
    StreamRequest,
    pack_open,
    pack_stream_request,
    parse_deletion,
    parse_mutation,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from tests.soak.attack.truth import Place, receive, words_of

PRODUCER: Final = 1
REMOVALS: Final = frozenset({Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION})
NOTHING: Final = Place(0, 0)


class Followed:
    """The outcome of one partition's stream."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why there was no stream; "" if there was one."""
        self.rollback_to: int | None = None
        self.documents: dict[bytes, bytes | None] = {}
        """What was sent, by key; None: a deletion."""
        self.seqno = 0
        self.reason: int | None = None
        """How the stream ended."""

    @property
    def is_whole(self) -> bool:
        """Whether it reached the requested end."""
        return self.reason == EndReason.OK

    def applied_to(self, documents: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Return the documents of a consumer that held these documents before."""
        held = {**documents, **self.documents}
        return {key: value for key, value in held.items() if value is not None}


def follow(
    port: int,
    ends: Mapping[int, int],
    starts: Mapping[int, Place] | None = None,
    *,
    name: bytes = b"attack",
    user: str = "",
    password: str = "",
) -> dict[int, Followed]:
    """Stream partitions up to these seqnos, from the beginning or from a consumer's position."""
    found = {vb_id: Followed() for vb_id in ends}
    waiting = set(ends)
    with RawClient(port, user, password) as client:
        assert not client.ask(Opcode.SELECT_BUCKET, key=b"default").status
        client.send(pack_open(name, PRODUCER))
        assert not receive(client).status
        client.send(b"".join(requests(ends, starts or {})))
        while waiting:
            frame = receive(client)
            vb_id = frame.opaque if frame.opcode == Opcode.DCP_STREAM_REQ else frame.vb_id
            take(found[vb_id], frame)
            is_over = found[vb_id].reason is not None or found[vb_id].refusal
            if is_over or found[vb_id].rollback_to is not None:
                waiting.discard(vb_id)
    return found


def requests(ends: Mapping[int, int], starts: Mapping[int, Place]) -> Iterable[bytes]:
    for vb_id, end in ends.items():
        place = starts.get(vb_id, NOTHING)
        uuid = place.vb_uuid if place.seqno else 0
        end_seqno = max(end, place.seqno)
        request = StreamRequest(0, place.seqno, end_seqno, uuid, place.seqno, place.seqno)
        yield pack_stream_request(vb_id, request, opaque=vb_id)


def take(followed: Followed, frame: Frame) -> None:
    """Process one frame of a partition's stream."""
    if frame.opcode == Opcode.DCP_STREAM_REQ:
        if frame.status == Status.ROLLBACK:
            followed.rollback_to = int.from_bytes(frame.value, "big")
        elif frame.status:
            followed.refusal = words_of(frame)
    elif frame.opcode == Opcode.DCP_MUTATION:
        followed.documents[frame.key] = frame.value
        followed.seqno = parse_mutation(frame).by_seqno
    elif frame.opcode in REMOVALS:
        followed.documents[frame.key] = None
        followed.seqno = parse_deletion(frame).by_seqno
    elif frame.opcode == Opcode.DCP_STREAM_END:
        followed.reason = parse_stream_end(frame)
