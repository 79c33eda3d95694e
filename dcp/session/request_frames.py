"""What is in a request beside its document, and what it costs. Pure.

**Frame infos** of flex requests: barrier, durability, stream id, preserve TTL.

`parse_frames` is the only place that reads them. Rules: kv_engine's.

Durability: level 1 is a majority of the copies in memory, 2 the same and the active copy on disk,
3 a majority on disk. A timeout of 0 or 0xffff is invalid. All three levels mean the same here: the
change is on the disks of the whole in-sync set before its answer, and of a majority of the copies
(failover/rules/write_answer.py). A node alone has the only copy.

**Stray parts** are those that a command does not have. kv_engine refuses such requests
(daemon/mcbp_validators.cc): a client that sends a part which nobody reads has taken the command for
another one.

**Costs** of requests that do not read or write one document: their bodies, and their work. Such a
request has a small body, and a batch of them lets other connections go on in between. What a
document's command costs is bounded by the document (`SessionState.spend_changes`,
`dcp.session.answers.long_requests`).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from dcp.wire.frame import Frame, RemoteProtocolError, frame_infos
from dcp.wire.message import STREAM_ID_FRAME
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from failover.rules.write_answer import LEVEL_MAX, LEVEL_MIN, TIMEOUT_INVALID, Durability

BARRIER_FRAME_ID: Final = 0
DURABILITY_FRAME_ID: Final = 1
TRACE_FRAME_ID: Final = 3
"""kv_engine's OpenTracing context, which it has given up. Here: a W3C traceparent, as text."""
PRESERVE_TTL_FRAME_ID: Final = 5

DURABLE: Final = frozenset(
    {
        Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.ADDQ, Opcode.REPLACE, Opcode.REPLACEQ,
        Opcode.DELETE, Opcode.DELETEQ, Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND,
        Opcode.PREPENDQ, Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ,
        Opcode.SUBDOC_DICT_ADD, Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_DELETE,
        Opcode.SUBDOC_REPLACE, Opcode.SUBDOC_ARRAY_PUSH_LAST, Opcode.SUBDOC_ARRAY_PUSH_FIRST,
        Opcode.SUBDOC_ARRAY_INSERT, Opcode.SUBDOC_ARRAY_ADD_UNIQUE, Opcode.SUBDOC_COUNTER,
        Opcode.SUBDOC_MULTI_MUTATION, Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
    }
)  # fmt: skip
"""Commands that may ask for durability."""


class RequestFrames(NamedTuple):
    """What the frame infos of a request ask for."""

    preserves_expiry: bool = False
    durability: Durability | None = None
    traceparent: str = ""


NO_FRAMES: Final = RequestFrames()


def parse_frames(
    framing: bytes, opcode: int, *, has_preserve_ttl: bool, has_durability: bool
) -> RequestFrames:
    """Return what the framing extras of a request ask for. Raises RefusedError.

    The last two arguments say what HELLO granted.
    """
    frames = NO_FRAMES
    try:
        for frame_id, data in frame_infos(framing):
            if frame_id == PRESERVE_TTL_FRAME_ID and has_preserve_ttl:
                frames = frames._replace(preserves_expiry=True)
            elif frame_id == DURABILITY_FRAME_ID and has_durability:
                frames = frames._replace(durability=_durability_of(data, opcode))
            elif frame_id == TRACE_FRAME_ID:
                frames = frames._replace(traceparent=data.decode("ascii", "replace"))
            elif frame_id != BARRIER_FRAME_ID and not (
                frame_id == STREAM_ID_FRAME and opcode == Opcode.DCP_CLOSE_STREAM
            ):
                why = f"frame info {frame_id} is not known here, or not negotiated (HELLO)"
                raise RefusedError(Status.UNKNOWN_FRAME_INFO, why)
    except RemoteProtocolError as error:
        raise RefusedError(Status.EINVAL, str(error)) from error
    return frames


def _durability_of(data: bytes, opcode: int) -> Durability:
    """Return what a durability frame asks for. Raises RefusedError."""
    if len(data) not in {1, 3}:
        why = f"durability is a level, or a level and a timeout: 1 or 3 bytes, not {len(data)}"
        raise RefusedError(Status.EINVAL, why)
    if not LEVEL_MIN <= data[0] <= LEVEL_MAX:
        why = f"there is no durability level {data[0]}; there are {LEVEL_MIN} to {LEVEL_MAX}"
        raise RefusedError(Status.DURABILITY_INVALID_LEVEL, why)
    timeout_ms = int.from_bytes(data[1:], "big") if len(data) > 1 else None
    if timeout_ms in TIMEOUT_INVALID:
        why = f"a durability timeout is 1 to 65534 ms, not {timeout_ms}"
        raise RefusedError(Status.EINVAL, why)
    if opcode not in DURABLE:
        raise RefusedError(Status.EINVAL, "this command has no durability")
    return Durability(data[0], timeout_ms)


def refuse_stray(request: Frame, *parts: Literal["extras", "key", "value"]) -> None:
    """Raise RefusedError (EINVAL) if the request has any of these parts."""
    for part in parts:
        if found := len(getattr(request, part)):
            name = Opcode(request.opcode).name
            raise RefusedError(Status.EINVAL, f"{name} takes no {part}; found {found} bytes")


COMMAND_BYTES_MAX: Final = 64 * 1024
"""Largest body of a command in SMALL_COMMANDS; many read a list of things from it."""

SMALL_COMMANDS: Final[frozenset[int]] = frozenset(
    {
        Opcode.HELLO, Opcode.SASL_LIST_MECHS, Opcode.SASL_AUTH, Opcode.SASL_STEP,
        Opcode.SELECT_BUCKET, Opcode.NOOP, Opcode.VERSION, Opcode.VERBOSITY, Opcode.STAT,
        Opcode.QUIT, Opcode.QUITQ, Opcode.FLUSH, Opcode.FLUSHQ, Opcode.GET_ERROR_MAP,
        Opcode.GET_CLUSTER_CONFIG, Opcode.GET_COLLECTIONS_MANIFEST, Opcode.GET_COLLECTION_ID,
        Opcode.GET_SCOPE_ID, Opcode.GET_ALL_VB_SEQNOS, Opcode.GET_FAILOVER_LOG,
        Opcode.DCP_GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO, Opcode.DCP_OPEN, Opcode.DCP_CONTROL,
        Opcode.DCP_STREAM_REQ, Opcode.DCP_CLOSE_STREAM, Opcode.DCP_BUFFER_ACK, Opcode.DCP_NOOP,
        Opcode.RANGE_SCAN_CREATE, Opcode.RANGE_SCAN_CONTINUE, Opcode.RANGE_SCAN_CANCEL,
        Opcode.GET_META, Opcode.GET_RANDOM_KEY, Opcode.GET_REPLICA,
        Opcode.GET_AND_LOCK, Opcode.UNLOCK, Opcode.TOUCH, Opcode.GAT, Opcode.GATQ,
        Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ,
    }
)  # fmt: skip

SHARES: Final[dict[int, float]] = {
    Opcode.STAT: 1.0,
    Opcode.RANGE_SCAN_CREATE: 1.0,
    Opcode.RANGE_SCAN_CONTINUE: 1.0,
    Opcode.GET_RANDOM_KEY: 1.0,
    Opcode.DCP_STREAM_REQ: 0.2,
    Opcode.HELLO: 0.2,
    Opcode.GET_CLUSTER_CONFIG: 0.1,
    Opcode.GET_COLLECTIONS_MANIFEST: 0.1,
    Opcode.GET_ALL_VB_SEQNOS: 0.1,
    Opcode.GET_FAILOVER_LOG: 0.02,
}
"""Which part of a turn one of these may take, at most some milliseconds."""
