"""Opcodes of the binary protocol, as one table.

The session dispatches on the opcodes, and docs/commands.md is generated from `OPCODES`. The names
are those of kv_engine and memcached. A quiet opcode answers errors only (changes) or hits only
(reads).

0x23 and 0x24 are unknown commands here, because memcached and Couchbase disagree about them: they
are GATK and GATKQ in one, IOCTL_GET and IOCTL_SET in the other.

0xe3 and 0xe5 to 0xef are our extensions, which a client has to negotiate. Couchbase numbers its
next DCP messages from 0x68 on, and its next commands from 0xe4 on.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class Magic(IntEnum):
    """First byte of a packet."""

    REQUEST = 0x80
    RESPONSE = 0x81
    FLEX_REQUEST = 0x08
    FLEX_RESPONSE = 0x18
    SERVER_REQUEST = 0x82
    SERVER_RESPONSE = 0x83


class Opcode(IntEnum):
    """Every opcode that this project sends, or answers with another status than UNKNOWN_COMMAND."""

    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    QUIT = 0x07
    FLUSH = 0x08
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    APPEND = 0x0E
    PREPEND = 0x0F
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    QUITQ = 0x17
    FLUSHQ = 0x18
    APPENDQ = 0x19
    PREPENDQ = 0x1A
    VERBOSITY = 0x1B
    TOUCH = 0x1C
    GAT = 0x1D
    GATQ = 0x1E
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
    DCP_PREPARE = 0x60
    DCP_COMMIT = 0x62
    DCP_ABORT = 0x63
    DCP_SEQNO_ADVANCED = 0x64
    DCP_OSO_SNAPSHOT = 0x65
    STOP_PERSISTENCE = 0x80
    START_PERSISTENCE = 0x81
    GET_REPLICA = 0x83
    SELECT_BUCKET = 0x89
    OBSERVE_SEQNO = 0x91
    GET_AND_LOCK = 0x94
    UNLOCK = 0x95
    GET_FAILOVER_LOG = 0x96
    GET_META = 0xA0
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    DEL_WITH_META = 0xA8
    DELQ_WITH_META = 0xA9
    COMPACT_DB = 0xB3
    GET_CLUSTER_CONFIG = 0xB5
    GET_RANDOM_KEY = 0xB6
    SEQNO_PERSISTENCE = 0xB7
    SET_COLLECTIONS_MANIFEST = 0xB9
    GET_COLLECTIONS_MANIFEST = 0xBA
    GET_COLLECTION_ID = 0xBB
    GET_SCOPE_ID = 0xBC
    SUBDOC_GET = 0xC5
    SUBDOC_EXISTS = 0xC6
    SUBDOC_DICT_ADD = 0xC7
    SUBDOC_DICT_UPSERT = 0xC8
    SUBDOC_DELETE = 0xC9
    SUBDOC_REPLACE = 0xCA
    SUBDOC_ARRAY_PUSH_LAST = 0xCB
    SUBDOC_ARRAY_PUSH_FIRST = 0xCC
    SUBDOC_ARRAY_INSERT = 0xCD
    SUBDOC_ARRAY_ADD_UNIQUE = 0xCE
    SUBDOC_COUNTER = 0xCF
    SUBDOC_MULTI_LOOKUP = 0xD0
    SUBDOC_MULTI_MUTATION = 0xD1
    SUBDOC_GET_COUNT = 0xD2
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0xD3
    RANGE_SCAN_CREATE = 0xDA
    RANGE_SCAN_CONTINUE = 0xDB
    RANGE_SCAN_CANCEL = 0xDC
    X_CUT = 0xE3
    X_BATCH = 0xE5
    X_READ_HASHES = 0xE6
    DCP_CLOSED_TIME = 0xE7
    X_READ_VERSIONS = 0xE8
    X_GROUP_BEAT = 0xE9
    X_REPLICA_ENTRIES = 0xEA
    X_REPLICA_ACK = 0xEB
    X_REPLICA_GROUP = 0xEC
    DCP_PREVIOUS_VALUE = 0xED
    DCP_SNAPSHOT_END = 0xEE
    X_PUT_FRAMES = 0xEF
    GET_ERROR_MAP = 0xFE


QUIET_FORMS: Final[dict[Opcode, Opcode]] = {
    Opcode.GETQ: Opcode.GET,
    Opcode.GETKQ: Opcode.GETK,
    Opcode.SETQ: Opcode.SET,
    Opcode.ADDQ: Opcode.ADD,
    Opcode.REPLACEQ: Opcode.REPLACE,
    Opcode.DELETEQ: Opcode.DELETE,
    Opcode.INCREMENTQ: Opcode.INCREMENT,
    Opcode.DECREMENTQ: Opcode.DECREMENT,
    Opcode.QUITQ: Opcode.QUIT,
    Opcode.FLUSHQ: Opcode.FLUSH,
    Opcode.APPENDQ: Opcode.APPEND,
    Opcode.PREPENDQ: Opcode.PREPEND,
    Opcode.GATQ: Opcode.GAT,
    Opcode.SETQ_WITH_META: Opcode.SET_WITH_META,
    Opcode.DELQ_WITH_META: Opcode.DEL_WITH_META,
}
"""Quiet opcode -> the loud opcode that does the same."""


class OpGroup(IntEnum):
    """What an opcode is about, in the order of the documentation."""

    SESSION = 1
    DOCUMENT = 2
    SUBDOC = 3
    PARTITION = 4
    COLLECTION = 5
    DCP = 6


class OpSpec(NamedTuple):
    """One line of the opcode table. `extras` and `body` describe the request, which the server
    sends in the case of stream messages; "-" means none.
    """

    group: OpGroup
    extras: str
    body: str
    meaning: str


_S, _D, _SUB, _P, _C, _DCP = OpGroup
_WITH_META: Final = "u32 flags, u32 expiry, u64 revision, u64 CAS (u32 options) (u16 length)"

_PATH: Final = "u16 path length, u8 path flags (u8 document flags)"
_CHANGE: Final = "u16 path length, u8 path flags (u32 expiry) (u8 document flags)"
_PUT: Final = "key, path, value"

OPCODES: Final[dict[Opcode, OpSpec]] = {
    Opcode.HELLO: OpSpec(_S, "-", "key agent, value u16 features", "negotiate features"),
    Opcode.SASL_LIST_MECHS: OpSpec(_S, "-", "-", "list the SASL mechanisms"),
    Opcode.SASL_AUTH: OpSpec(_S, "-", "key mechanism, value message", "start a login"),
    Opcode.SASL_STEP: OpSpec(_S, "-", "key mechanism, value message", "continue a login"),
    Opcode.SELECT_BUCKET: OpSpec(_S, "-", "key bucket", "select the bucket"),
    Opcode.GET_CLUSTER_CONFIG: OpSpec(
        _S, "- or i64 epoch, i64 revision", "-", "the partition map as JSON, if it is newer"
    ),
    Opcode.GET_ERROR_MAP: OpSpec(_S, "-", "value u16 version", "what each status means, as JSON"),
    Opcode.NOOP: OpSpec(_S, "-", "-", "answer without effect"),
    Opcode.VERSION: OpSpec(_S, "-", "-", "a version number; clients derive features from it"),
    Opcode.STAT: OpSpec(_S, "-", "- or key group", "statistics: one response each, then one empty"),
    Opcode.VERBOSITY: OpSpec(_S, "u32 level", "-", "accepted; the server's settings decide"),
    Opcode.QUIT: OpSpec(_S, "-", "-", "close the connection"),
    Opcode.QUITQ: OpSpec(_S, "-", "-", "close the connection, no answer"),
    Opcode.GET: OpSpec(_D, "-", "key", "the document, its flags and CAS"),
    Opcode.GETQ: OpSpec(_D, "-", "key", "GET, silent on a miss"),
    Opcode.GETK: OpSpec(_D, "-", "key", "GET that answers the key too"),
    Opcode.GETKQ: OpSpec(_D, "-", "key", "GETK, silent on a miss"),
    Opcode.SET: OpSpec(_D, "u32 flags, u32 expiry", "key, value", "store, replacing what is there"),
    Opcode.SETQ: OpSpec(_D, "u32 flags, u32 expiry", "key, value", "SET, silent on success"),
    Opcode.ADD: OpSpec(_D, "u32 flags, u32 expiry", "key, value", "store if the key is not there"),
    Opcode.ADDQ: OpSpec(_D, "u32 flags, u32 expiry", "key, value", "ADD, silent on success"),
    Opcode.REPLACE: OpSpec(_D, "u32 flags, u32 expiry", "key, value", "store if the key is there"),
    Opcode.REPLACEQ: OpSpec(
        _D, "u32 flags, u32 expiry", "key, value", "REPLACE, silent on success"
    ),
    Opcode.DELETE: OpSpec(_D, "-", "key", "delete; the deletion has its own seqno"),
    Opcode.DELETEQ: OpSpec(_D, "-", "key", "DELETE, silent on success"),
    Opcode.INCREMENT: OpSpec(
        _D, "u64 delta, u64 initial, u32 expiry", "key",
        "add to a counter, wrap at 2^64; expiry 0xffffffff: do not create",
    ),
    Opcode.INCREMENTQ: OpSpec(
        _D, "u64 delta, u64 initial, u32 expiry", "key", "INCREMENT, silent on success"
    ),
    Opcode.DECREMENT: OpSpec(
        _D, "u64 delta, u64 initial, u32 expiry", "key", "subtract from a counter, stop at 0"
    ),
    Opcode.DECREMENTQ: OpSpec(
        _D, "u64 delta, u64 initial, u32 expiry", "key", "DECREMENT, silent on success"
    ),
    Opcode.APPEND: OpSpec(_D, "-", "key, value", "add to the end of a document"),
    Opcode.APPENDQ: OpSpec(_D, "-", "key, value", "APPEND, silent on success"),
    Opcode.PREPEND: OpSpec(_D, "-", "key, value", "add to the beginning of a document"),
    Opcode.PREPENDQ: OpSpec(_D, "-", "key, value", "PREPEND, silent on success"),
    Opcode.TOUCH: OpSpec(_D, "u32 expiry", "key", "set a document's expiry"),
    Opcode.GAT: OpSpec(_D, "u32 expiry", "key", "TOUCH and GET in one"),
    Opcode.GATQ: OpSpec(_D, "u32 expiry", "key", "GAT, silent on a miss"),
    Opcode.GET_AND_LOCK: OpSpec(
        _D, "- or u32 seconds", "key",
        "GET, and lock the document for 1 to 30 seconds, by default 15. Changes need the CAS of"
        " this answer until then, others get LOCKED, and reads show a CAS of 2^64 - 1. A restart"
        " and a new version of the partition end all locks",
    ),
    Opcode.UNLOCK: OpSpec(_D, "-", "key", "end a lock; the header carries its CAS"),
    Opcode.GET_REPLICA: OpSpec(
        _D, "- or (ours) u64 vb_uuid, u64 seqno", "key",
        "GET from a partition that is a replica here, of what it knows to be committed; else"
        " NOT_MY_VBUCKET. With extras, a replica that does not know of that change answers ETMPFAIL"
    ),
    Opcode.GET_RANDOM_KEY: OpSpec(
        _D, "- or u32 collection", "-", "some document of the collection, with its key"
    ),
    Opcode.GET_META: OpSpec(
        _D, "- or u8 2", "key", "revision, flags and expiry of a document, also of a deleted one"
    ),
    Opcode.SET_WITH_META: OpSpec(
        _D, _WITH_META, "key, value",
        "store with the given flags, expiry, revision and CAS if it wins against the present"
        " version. A CAS that is further ahead of the clock than the setting cas_drift_max is"
        " refused: CAS_VALUE_INVALID (EINVAL without XERROR). Option 0x01000000, an extension"
        " negotiated by HELLO 0xdc02, replaces such a CAS by the server's; then the revision alone"
        " decides",
    ),
    Opcode.SETQ_WITH_META: OpSpec(
        _D, _WITH_META, "key, value", "SET_WITH_META, silent on success"
    ),
    Opcode.DEL_WITH_META: OpSpec(_D, _WITH_META, "key", "the same for a deletion"),
    Opcode.DELQ_WITH_META: OpSpec(_D, _WITH_META, "key", "DEL_WITH_META, silent on success"),
    Opcode.X_PUT_FRAMES: OpSpec(
        _D, "u32 options, u32 frames", "value u32 body length of each, stored frames",
        "an extension negotiated by HELLO 0xdc01: SET_WITH_META for many changes of a partition, as"
        " frames that streams send. Answers u32 applied, u32 lost, with option 0x01000000 u32"
        " number of replaced CAS, then u32 index and u16 status of each refused frame",
    ),
    Opcode.X_BATCH: OpSpec(
        _D, "u32 changes",
        "key, value: of each change u8 mode, u8 0, u16 key length, u32 flags, u32 expiry, u64 CAS,"
        " u32 value length, key, value",
        "an extension, on a node alone: make all changes, or none, with one CAS. The request's key"
        " is one of theirs, and names their collection; theirs have no collection id. Mode 0 SET,"
        " 1 ADD, 2 REPLACE, 3 DELETE. Answers u64 vb_uuid, u64 seqno of each",
    ),
    Opcode.FLUSH: OpSpec(
        _D, "- or u32 0", "-", "delete every document; each deletion has its own seqno"
    ),
    Opcode.FLUSHQ: OpSpec(_D, "- or u32 0", "-", "FLUSH, silent on success"),
    Opcode.RANGE_SCAN_CREATE: OpSpec(
        _D, "-", "value JSON",
        "open a scan of a partition as it is now: a range of keys, or a sample. Answers its id."
        " Does not wait for a required seqno",
    ),
    Opcode.RANGE_SCAN_CONTINUE: OpSpec(
        _D, "16 bytes id, u32 documents, u32 ms, u32 bytes", "-",
        "the next documents of a scan, in one packet: MORE (perhaps with none) or COMPLETE",
    ),
    Opcode.RANGE_SCAN_CANCEL: OpSpec(_D, "16 bytes id", "-", "cancel a scan"),
    Opcode.SUBDOC_GET: OpSpec(_SUB, _PATH, "key, path", "the value at a path"),
    Opcode.SUBDOC_EXISTS: OpSpec(_SUB, _PATH, "key, path", "whether there is a value at a path"),
    Opcode.SUBDOC_GET_COUNT: OpSpec(
        _SUB, _PATH, "key, path", "how many members or elements a container has"
    ),
    Opcode.SUBDOC_DICT_ADD: OpSpec(_SUB, _CHANGE, _PUT, "add a member that does not exist"),
    Opcode.SUBDOC_DICT_UPSERT: OpSpec(_SUB, _CHANGE, _PUT, "add or replace a member"),
    Opcode.SUBDOC_REPLACE: OpSpec(_SUB, _CHANGE, _PUT, "replace a value that exists"),
    Opcode.SUBDOC_DELETE: OpSpec(_SUB, _CHANGE, "key, path", "remove a member or an element"),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: OpSpec(_SUB, _CHANGE, _PUT, "add elements to an array's end"),
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: OpSpec(
        _SUB, _CHANGE, _PUT, "add elements to an array's beginning"
    ),
    Opcode.SUBDOC_ARRAY_INSERT: OpSpec(
        _SUB, _CHANGE, _PUT, "add elements before the element that the path names"
    ),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: OpSpec(
        _SUB, _CHANGE, _PUT, "add an element that is not in the array"
    ),
    Opcode.SUBDOC_COUNTER: OpSpec(
        _SUB, _CHANGE, "key, path, delta as text", "add to a number; answers the new one"
    ),
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR: OpSpec(
        _SUB, _CHANGE, "key, path", "make the value of an XATTR the document's body"
    ),
    Opcode.SUBDOC_MULTI_LOOKUP: OpSpec(
        _SUB, "- or u8 document flags",
        "key; for each u8 opcode, u8 path flags, u16 path length, path",
        "up to 16 look-ups: GET, EXISTS, GET_COUNT, and GET (0x00) of the body. Answers u16 status,"
        " u32 length, value of each",
    ),
    Opcode.SUBDOC_MULTI_MUTATION: OpSpec(
        _SUB, "(u32 expiry) (u8 document flags)",
        "key; for each u8 opcode, u8 path flags, u16 path length, u32 value length, path, value",
        "up to 16 changes, all or none; also SET (0x01) and DELETE (0x04) of the body. Answers u8"
        " index, u16 status, u32 length, value of counters; or index and status of what failed",
    ),
    Opcode.GET_ALL_VB_SEQNOS: OpSpec(
        _P, "-, u32 state, or u32 state, u32 collection", "-", "u16 vbucket, u64 seqno of each"
    ),
    Opcode.GET_FAILOVER_LOG: OpSpec(_P, "-", "-", "a partition's versions, newest first"),
    Opcode.OBSERVE_SEQNO: OpSpec(
        _P, "-", "value u64 vb_uuid", "a version's last seqno in memory and on disk"
    ),
    Opcode.SEQNO_PERSISTENCE: OpSpec(
        _P, "u64 seqno", "-",
        "answer when this change of a partition is on disk; ETMPFAIL if it does not exist yet",
    ),
    Opcode.COMPACT_DB: OpSpec(
        _P, "u64 time in s, u64 seqno, u8 all, 7 bytes 0", "-",
        "purge a partition's deletions up to a time and a seqno (0: any), or all of them. The next"
        " compaction drops them. Replicas follow their master",
    ),
    Opcode.X_GROUP_BEAT: OpSpec(
        _P, "-", "key _dcpd:group:NAME, value JSON",
        "a member of a group of consumers joins, renews its lease, or leaves; answers JSON: epoch,"
        " members, and the partitions of this one. For the master of the key's partition",
    ),
    Opcode.X_CUT: OpSpec(
        _P, "u8 what, u64 round, u64 time, u64 clock", "key the leader's id",
        "between nodes: say the clock (0), draw a cut of the cluster (1), all have drawn it (2):"
        " see [consistent-cuts.md](consistent-cuts.md)",
    ),
    Opcode.X_READ_VERSIONS: OpSpec(
        _P, "u64 first, u64 last seqno", "-",
        "between nodes: the versions of a range, and the failover log, for a copy that cannot read"
        " its own",
    ),
    Opcode.X_READ_HASHES: OpSpec(
        _P, "u8 what, u8 bits, u32 collection",
        "(key) (value u16 buckets, u64 seqnos, or u64 hashes)",
        "hashes of a collection's documents in a partition (0), the keys and versions in some of"
        " their buckets (1), documents by seqno (2), keys and versions in the buckets that differ"
        " from a copy's (3): see [diff.md](diff.md)",
    ),
    Opcode.STOP_PERSISTENCE: OpSpec(
        _P, "-", "-",
        "for tests, on a node alone: hold commits, so that writes are not answered and streams show"
        " nothing new",
    ),
    Opcode.START_PERSISTENCE: OpSpec(_P, "-", "-", "commit what STOP_PERSISTENCE held, and go on"),
    Opcode.SET_COLLECTIONS_MANIFEST: OpSpec(
        _C, "-", "value JSON", "replace all scopes and collections"
    ),
    Opcode.GET_COLLECTIONS_MANIFEST: OpSpec(_C, "-", "-", "scopes and collections as JSON"),
    Opcode.GET_COLLECTION_ID: OpSpec(_C, "-", "scope.collection", "the id of a collection"),
    Opcode.GET_SCOPE_ID: OpSpec(_C, "-", "scope", "the id of a scope"),
    Opcode.DCP_OPEN: OpSpec(
        _DCP, "u32 0, u32 flags", "key name", "turn the connection into a DCP connection"
    ),
    Opcode.DCP_CONTROL: OpSpec(_DCP, "-", "key, value", "set a property of the connection"),
    Opcode.DCP_STREAM_REQ: OpSpec(
        _DCP, "48 bytes", "- or value JSON", "stream a partition: OK, or ROLLBACK to a seqno"
    ),
    Opcode.DCP_CLOSE_STREAM: OpSpec(_DCP, "-", "-", "end a stream"),
    Opcode.DCP_GET_FAILOVER_LOG: OpSpec(_DCP, "-", "-", "a partition's versions, newest first"),
    Opcode.DCP_ADD_STREAM: OpSpec(
        _DCP, "u32 flags", "-", "for consumer connections; closes a producer connection"
    ),
    **dict.fromkeys(
        (Opcode.DCP_PREPARE, Opcode.DCP_COMMIT, Opcode.DCP_ABORT),
        OpSpec(_DCP, "any", "any", "for consumer connections; closes a producer connection"),
    ),
    Opcode.DCP_BUFFER_ACK: OpSpec(
        _DCP, "u32 bytes", "-", "acknowledge bytes; only a refusal is answered"
    ),
    Opcode.DCP_NOOP: OpSpec(_DCP, "-", "-", "sent by the server to check that the client is alive"),
    Opcode.DCP_SNAPSHOT_MARKER: OpSpec(
        _DCP, "u64 start, u64 end, u32 type", "-", "sent: a snapshot begins"
    ),
    Opcode.DCP_MUTATION: OpSpec(_DCP, "31 bytes", "key, value", "sent: a document was stored"),
    Opcode.DCP_DELETION: OpSpec(_DCP, "18 or 21 bytes", "key", "sent: a document was deleted"),
    Opcode.DCP_EXPIRATION: OpSpec(
        _DCP, "u64 seqno, u64 revision, u32 time", "key", "sent: a document expired"
    ),
    Opcode.DCP_STREAM_END: OpSpec(_DCP, "u32 reason", "-", "sent: the stream has ended"),
    Opcode.DCP_SET_VBUCKET_STATE: OpSpec(_DCP, "u8 state", "-", "sent: next step of a takeover"),
    Opcode.DCP_SYSTEM_EVENT: OpSpec(
        _DCP, "u64 seqno, u32 event, u8 version", "key, value",
        "sent: a collection or scope was created or dropped",
    ),
    Opcode.DCP_SEQNO_ADVANCED: OpSpec(
        _DCP, "u64 seqno", "-", "sent: nothing more for this filter up to this seqno"
    ),
    Opcode.DCP_OSO_SNAPSHOT: OpSpec(
        _DCP, "u32 1 or 2", "-",
        "sent: after the marker, with control enable_out_of_order_snapshots: the first snapshot of"
        " a collection begins (1) or is complete (2)",
    ),
    Opcode.DCP_PREVIOUS_VALUE: OpSpec(
        _DCP, "u64 seqno, u64 previous seqno", "value", "sent: the value the next change replaces"
    ),
    Opcode.DCP_SNAPSHOT_END: OpSpec(_DCP, "u64 end", "-", "sent: the snapshot is complete"),
    Opcode.DCP_CLOSED_TIME: OpSpec(
        _DCP, "u64 time", "-",
        "sent: with control x_closed_times: the streams of this connection have brought the node's"
        " state as of a time, and nothing that was changed after it. In a cluster u64 round"
        " follows: cuts of two nodes are one if both numbers are equal",
    ),
    Opcode.X_REPLICA_ENTRIES: OpSpec(
        _DCP, "u64 number, u64 question, u32 CRC-32C", "value sections",
        "sent: between nodes, to a replica's node after control x_replicate: entries of several"
        " partitions, or none (a heartbeat)",
    ),
    Opcode.X_REPLICA_ACK: OpSpec(
        _DCP, "u64 number, u64 question, u64 store link, u64 store revision",
        "value for each partition u16 partition, u64 next seqno, u64 floor, u64 purge",
        "between nodes: a replica's node has synced all messages up to a number, and confirms the"
        " master; at times, how far the streams that it serves let floors rise. Never answered",
    ),
    Opcode.X_REPLICA_GROUP: OpSpec(
        _DCP, "u64 number, u64 question, u32 opaque, u64 from, u64 to, u8 synced, u32 CRC-32C",
        "value stored entries",
        "sent: between nodes, to a replica's node after control x_replicate: a commit group, or"
        " nothing; the groups of the messages between two numbers are committed",
    ),
}  # fmt: skip
"""What each opcode does, in the order of the documentation."""
