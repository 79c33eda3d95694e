"""Opcodes of the binary protocol, as one table.

The session dispatches on it, the documentation is generated from it. Names are the field's own
(kv_engine, memcached); a quiet opcode answers errors only (mutations) or hits only (reads).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Magic(IntEnum):
    """First byte of a packet."""

    REQUEST = 0x80
    RESPONSE = 0x81
    FLEX_REQUEST = 0x08
    FLEX_RESPONSE = 0x18
    SERVER_REQUEST = 0x82
    SERVER_RESPONSE = 0x83


class Opcode(IntEnum):
    """Every opcode that this project sends or answers with something else than 0x81."""

    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    QUIT = 0x07
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    QUITQ = 0x17
    HELLO = 0x1F
    SASL_LIST_MECHS = 0x20
    SASL_AUTH = 0x21
    SASL_STEP = 0x22
    GET_ALL_VB_SEQNOS = 0x48
    DCP_OPEN = 0x50
    DCP_ADD_STREAM = 0x51
    DCP_CLOSE_STREAM = 0x52
    DCP_STREAM_REQ = 0x53
    DCP_GET_FAILOVER_LOG = 0x54
    DCP_STREAM_END = 0x55
    DCP_SNAPSHOT_MARKER = 0x56
    DCP_MUTATION = 0x57
    DCP_DELETION = 0x58
    DCP_EXPIRATION = 0x59
    DCP_SET_VBUCKET_STATE = 0x5B
    DCP_NOOP = 0x5C
    DCP_BUFFER_ACK = 0x5D
    DCP_CONTROL = 0x5E
    DCP_SYSTEM_EVENT = 0x5F
    DCP_SEQNO_ADVANCED = 0x64
    DCP_SNAPSHOT_END = 0x6F
    SELECT_BUCKET = 0x89
    OBSERVE_SEQNO = 0x91
    GET_FAILOVER_LOG = 0x96
    GET_CLUSTER_CONFIG = 0xB5
    GET_COLLECTIONS_MANIFEST = 0xBA
    GET_COLLECTION_ID = 0xBB
    GET_SCOPE_ID = 0xBC
    GET_ERROR_MAP = 0xFE


QUIET_FORMS: Final[dict[Opcode, Opcode]] = {
    Opcode.GETQ: Opcode.GET,
    Opcode.GETKQ: Opcode.GETK,
    Opcode.SETQ: Opcode.SET,
    Opcode.ADDQ: Opcode.ADD,
    Opcode.REPLACEQ: Opcode.REPLACE,
    Opcode.DELETEQ: Opcode.DELETE,
    Opcode.QUITQ: Opcode.QUIT,
}
"""Quiet opcode -> the opcode whose work it does."""
