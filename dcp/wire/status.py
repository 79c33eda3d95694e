"""Status codes, the error map (GET_ERROR_MAP, format version 2), and errors that carry a status."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final


class Status(IntEnum):
    """Status of a response."""

    OK = 0x00
    KEY_ENOENT = 0x01
    KEY_EEXISTS = 0x02
    E2BIG = 0x03
    EINVAL = 0x04
    NOT_STORED = 0x05
    DELTA_BADVAL = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    DCP_STREAM_NOT_FOUND = 0x0A
    NOT_LOCKED = 0x0E
    CAS_VALUE_INVALID = 0x0F
    AUTH_STALE = 0x1F
    AUTH_ERROR = 0x20
    AUTH_CONTINUE = 0x21
    ERANGE = 0x22
    ROLLBACK = 0x23
    EACCESS = 0x24
    UNKNOWN_FRAME_INFO = 0x80
    UNKNOWN_COMMAND = 0x81
    ENOMEM = 0x82
    NOT_SUPPORTED = 0x83
    EINTERNAL = 0x84
    EBUSY = 0x85
    ETMPFAIL = 0x86
    XATTR_EINVAL = 0x87
    UNKNOWN_COLLECTION = 0x88
    CANNOT_APPLY_COLLECTIONS_MANIFEST = 0x89
    UNKNOWN_SCOPE = 0x8C
    DCP_STREAMID_INVALID = 0x8D
    DURABILITY_INVALID_LEVEL = 0xA0
    DURABILITY_IMPOSSIBLE = 0xA1
    SYNC_WRITE_AMBIGUOUS = 0xA3
    RANGE_SCAN_CANCELLED = 0xA5
    RANGE_SCAN_MORE = 0xA6
    RANGE_SCAN_COMPLETE = 0xA7
    RANGE_SCAN_VB_UUID_NOT_EQUAL = 0xA8
    SUBDOC_PATH_ENOENT = 0xC0
    SUBDOC_PATH_MISMATCH = 0xC1
    SUBDOC_PATH_EINVAL = 0xC2
    SUBDOC_PATH_E2BIG = 0xC3
    SUBDOC_DOC_E2DEEP = 0xC4
    SUBDOC_VALUE_CANTINSERT = 0xC5
    SUBDOC_DOC_NOTJSON = 0xC6
    SUBDOC_NUM_ERANGE = 0xC7
    SUBDOC_DELTA_EINVAL = 0xC8
    SUBDOC_PATH_EEXISTS = 0xC9
    SUBDOC_VALUE_ETOODEEP = 0xCA
    SUBDOC_INVALID_COMBO = 0xCB
    SUBDOC_MULTI_PATH_FAILURE = 0xCC
    SUBDOC_SUCCESS_DELETED = 0xCD
    SUBDOC_XATTR_INVALID_FLAG_COMBO = 0xCE
    SUBDOC_XATTR_INVALID_KEY_COMBO = 0xCF
    SUBDOC_XATTR_UNKNOWN_MACRO = 0xD0
    SUBDOC_XATTR_UNKNOWN_VATTR = 0xD1
    SUBDOC_XATTR_CANT_MODIFY_VATTR = 0xD2
    SUBDOC_MULTI_PATH_FAILURE_DELETED = 0xD3
    SUBDOC_INVALID_XATTR_ORDER = 0xD4
    SUBDOC_XATTR_UNKNOWN_VATTR_MACRO = 0xD5
    SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS = 0xD6
    SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE = 0xD7
    X_FENCED = 0xFF01
    """Ours: the two sides of a replication stream are on different leader epochs."""


class RefusedError(Exception):
    """A request is refused: `status` is the answer, the text says why and what to try."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class WrongVbucketError(RefusedError):
    """The partition is not served here. The answer carries the configuration instead of a text.

    `vb_id` None: that which the request names.
    """

    def __init__(self, vb_id: int | None = None) -> None:
        super().__init__(Status.NOT_MY_VBUCKET, "")
        self.vb_id = vb_id


class UnknownNameError(RefusedError):
    """There is no such collection or scope. The answer carries the manifest's uid, so that the
    client can tell whether it or the server is behind, and with XERROR the text.
    """

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(status, text)


ERROR_TABLE: Final[dict[Status, tuple[str, str, tuple[str, ...]]]] = {
    Status.KEY_ENOENT: ("KEY_ENOENT", "not found", ("item-only",)),
    Status.KEY_EEXISTS: ("KEY_EEXISTS", "exists already, or CAS mismatch", ("item-only",)),
    Status.E2BIG: ("E2BIG", "value too large", ("item-only", "invalid-input")),
    Status.EINVAL: ("EINVAL", "invalid request", ("internal", "invalid-input")),
    Status.NOT_STORED: ("NOT_STORED", "not stored", ("item-only",)),
    Status.DELTA_BADVAL: ("DELTA_BADVAL", "not a number", ("item-only", "invalid-input")),
    Status.NOT_MY_VBUCKET: (
        "NOT_MY_VBUCKET",
        "the partition is not active on this node",
        ("fetch-config", "invalid-input"),
    ),
    Status.NO_BUCKET: ("NO_BUCKET", "no bucket is selected", ("conn-state-invalidated",)),
    Status.LOCKED: (
        "LOCKED",
        "another client locked the document",
        ("item-only", "item-locked", "retry-now"),
    ),
    Status.NOT_LOCKED: ("NOT_LOCKED", "the document is not locked", ("item-only",)),
    Status.DCP_STREAM_NOT_FOUND: (
        "DCP_STREAM_NOT_FOUND",
        "no such stream on this connection",
        ("dcp", "item-only"),
    ),
    Status.CAS_VALUE_INVALID: (
        "CAS_VALUE_INVALID",
        "a CAS from elsewhere is too far ahead of the server's clock",
        ("item-only", "invalid-input"),
    ),
    Status.AUTH_STALE: ("AUTH_STALE", "authenticate again", ("conn-state-invalidated", "auth")),
    Status.AUTH_ERROR: ("AUTH_ERROR", "authentication failed", ("conn-state-invalidated", "auth")),
    Status.AUTH_CONTINUE: ("AUTH_CONTINUE", "another SASL step follows", ("special-handling",)),
    Status.ERANGE: ("ERANGE", "out of range", ("invalid-input",)),
    Status.ROLLBACK: ("ROLLBACK", "the client must roll back", ("dcp", "special-handling")),
    Status.EACCESS: ("EACCESS", "no access", ("support",)),
    Status.UNKNOWN_FRAME_INFO: ("UNKNOWN_FRAME_INFO", "unknown frame info", ("invalid-input",)),
    Status.UNKNOWN_COMMAND: ("UNKNOWN_COMMAND", "unknown command", ("support",)),
    Status.ENOMEM: ("ENOMEM", "out of memory", ("temp", "retry-later")),
    Status.NOT_SUPPORTED: ("NOT_SUPPORTED", "not supported", ("support",)),
    Status.EINTERNAL: ("EINTERNAL", "internal error", ("internal", "conn-state-invalidated")),
    Status.EBUSY: ("EBUSY", "busy", ("temp", "retry-later")),
    Status.ETMPFAIL: ("ETMPFAIL", "temporary failure", ("temp", "retry-later")),
    Status.UNKNOWN_COLLECTION: ("UNKNOWN_COLLECTION", "unknown collection", ("item-only",)),
    Status.DCP_STREAMID_INVALID: (
        "DCP_STREAMID_INVALID",
        "a stream id is missing, or not enabled",
        ("dcp", "invalid-input"),
    ),
    Status.CANNOT_APPLY_COLLECTIONS_MANIFEST: (
        "CANNOT_APPLY_COLLECTIONS_MANIFEST",
        "the manifest cannot follow the one in force",
        ("internal",),
    ),
    Status.UNKNOWN_SCOPE: ("UNKNOWN_SCOPE", "unknown scope", ("item-only",)),
    Status.DURABILITY_INVALID_LEVEL: (
        "DURABILITY_INVALID_LEVEL",
        "there is no such durability level",
        ("item-only", "invalid-input"),
    ),
    Status.DURABILITY_IMPOSSIBLE: (
        "DURABILITY_IMPOSSIBLE",
        "too few copies are in sync; nothing was changed",
        ("item-only",),
    ),
    Status.SYNC_WRITE_AMBIGUOUS: (
        "SYNC_WRITE_AMBIGUOUS",
        "the write was applied, and may or may not be committed",
        ("item-only",),
    ),
    Status.RANGE_SCAN_CANCELLED: (
        "RANGE_SCAN_CANCELLED",
        "the scan cannot continue: it was rolled back, pinned history for too long, or gave way",
        ("fetch-config",),
    ),
    Status.RANGE_SCAN_MORE: ("RANGE_SCAN_MORE", "the scan has more documents", ("success",)),
    Status.RANGE_SCAN_COMPLETE: (
        "RANGE_SCAN_COMPLETE",
        "the scan has no more documents",
        ("success",),
    ),
    Status.RANGE_SCAN_VB_UUID_NOT_EQUAL: (
        "RANGE_SCAN_VB_UUID_NOT_EQUAL",
        "the partition has another version",
        ("item-only",),
    ),
    Status.X_FENCED: (
        "X_FENCED",
        "the two nodes are on different leader epochs; read the replication record again",
        ("internal",),
    ),
    Status.XATTR_EINVAL: ("XATTR_EINVAL", "the XATTR is invalid", ("invalid-input",)),
    Status.SUBDOC_PATH_ENOENT: (
        "SUBDOC_PATH_ENOENT",
        "the path does not exist",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_PATH_MISMATCH: (
        "SUBDOC_PATH_MISMATCH",
        "a value on the path has another type",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_PATH_EINVAL: (
        "SUBDOC_PATH_EINVAL",
        "the path cannot be read, or does not fit the command",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_PATH_E2BIG: (
        "SUBDOC_PATH_E2BIG",
        "the path has too many components",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_DOC_E2DEEP: (
        "SUBDOC_DOC_E2DEEP",
        "the document has too many levels",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_VALUE_CANTINSERT: (
        "SUBDOC_VALUE_CANTINSERT",
        "the value is not JSON, is not allowed in this place, or is out of the range of counters",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_DOC_NOTJSON: (
        "SUBDOC_DOC_NOTJSON",
        "the document is not JSON",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_NUM_ERANGE: (
        "SUBDOC_NUM_ERANGE",
        "the number is out of the range of counters",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_DELTA_EINVAL: (
        "SUBDOC_DELTA_EINVAL",
        "the delta is not an integer of 64 bits other than 0",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_PATH_EEXISTS: (
        "SUBDOC_PATH_EEXISTS",
        "the path exists already",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_VALUE_ETOODEEP: (
        "SUBDOC_VALUE_ETOODEEP",
        "the value would make the document too deep",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_INVALID_COMBO: (
        "SUBDOC_INVALID_COMBO",
        "these operations cannot be in one request",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_MULTI_PATH_FAILURE: (
        "SUBDOC_MULTI_PATH_FAILURE",
        "some operations failed; the body says which",
        ("subdoc",),
    ),
    Status.SUBDOC_SUCCESS_DELETED: (
        "SUBDOC_SUCCESS_DELETED",
        "done; the document is deleted",
        ("subdoc", "success"),
    ),
    Status.SUBDOC_XATTR_INVALID_FLAG_COMBO: (
        "SUBDOC_XATTR_INVALID_FLAG_COMBO",
        "these flags of a path exclude each other",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_XATTR_INVALID_KEY_COMBO: (
        "SUBDOC_XATTR_INVALID_KEY_COMBO",
        "one request names one XATTR",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_XATTR_UNKNOWN_MACRO: (
        "SUBDOC_XATTR_UNKNOWN_MACRO",
        "no such macro",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_XATTR_UNKNOWN_VATTR: (
        "SUBDOC_XATTR_UNKNOWN_VATTR",
        "no such virtual XATTR",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_XATTR_CANT_MODIFY_VATTR: (
        "SUBDOC_XATTR_CANT_MODIFY_VATTR",
        "virtual XATTRs cannot be changed",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_MULTI_PATH_FAILURE_DELETED: (
        "SUBDOC_MULTI_PATH_FAILURE_DELETED",
        "some operations failed; the document is deleted",
        ("subdoc",),
    ),
    Status.SUBDOC_INVALID_XATTR_ORDER: (
        "SUBDOC_INVALID_XATTR_ORDER",
        "operations on XATTRs come first",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO: (
        "SUBDOC_XATTR_UNKNOWN_VATTR_MACRO",
        "no such macro of a virtual XATTR",
        ("subdoc", "invalid-input"),
    ),
    Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS: (
        "SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS",
        "the document is not deleted",
        ("subdoc", "item-only"),
    ),
    Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE: (
        "SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE",
        "a deleted document has XATTRs only",
        ("subdoc", "item-only"),
    ),
}
"""Status -> (name, description, attributes of the error map)."""

MEMCACHED_TEXTS: Final[dict[int, bytes]] = {
    Status.KEY_ENOENT: b"Not found",
    Status.KEY_EEXISTS: b"Data exists for key.",
    Status.E2BIG: b"Too large.",
    Status.EINVAL: b"Invalid arguments",
    Status.NOT_STORED: b"Not stored.",
    Status.DELTA_BADVAL: b"Non-numeric server-side value for incr or decr",
    Status.AUTH_ERROR: b"Auth failure.",
    Status.UNKNOWN_COMMAND: b"Unknown command",
    Status.ENOMEM: b"Out of memory",
}
"""The bodies of memcached's errors, as its clients show them."""

ERROR_MAP_VERSION: Final = 2
ERROR_MAP_REVISION: Final = 3
_MAPPED_MAX: Final = 0x7FFF
"""The Java SDK reads codes as signed 16 bits: a higher one makes it discard the whole map. Those
above are between nodes only."""


def error_map_document(version: int) -> dict[str, Any]:
    """Return the error map as the JSON document of GET_ERROR_MAP, in the newest format up to a
    version. Version 2 differs in what clients do with attributes that they do not know.
    """
    return {
        "version": min(version, ERROR_MAP_VERSION),
        "revision": ERROR_MAP_REVISION,
        "errors": {
            f"{status:x}": {"name": name, "desc": text, "attrs": list(attributes)}
            for status, (name, text, attributes) in ERROR_TABLE.items()
            if status <= _MAPPED_MAX
        },
    }
