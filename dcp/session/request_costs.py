"""What requests cost that do not read or write one document: their bodies, and their work. Pure.

Such a request has a small body, and a batch of them lets other connections go on in between. What
a document's command costs is bounded by the document (`SessionState.spend_changes`,
`dcp.session.long_requests`).
"""

from __future__ import annotations

from typing import Final

from dcp.wire.opcode import Opcode

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
