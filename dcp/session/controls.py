"""DCP_CONTROL: one table of the keys that a client may set, and their values; and the JSON value of
a stream request.

An unknown key is answered with EINVAL, and a known one that this server does not support with
NOT_SUPPORTED. `x_` keys are this server's own (docs/streams.md), the others are kv_engine's.

**The value of a stream request**, except for its filter:

    {"uid": "0", "collections": [...], "scope": "...", "purge_seqno": "17",
     "sid": 3, "key_prefixes": ["<hexadecimal>", ...],
     "version_log": [["<vb_uuid>", "<seqno>"], ...], "want_version_log": false}

64-bit numbers are decimal text, because JSON readers round them. Unknown names are ignored. So are
`version_log` and `want_version_log` without control x_version_log, and `key_prefixes` without
x_key_prefix. `sid` needs enable_stream_id. `dcp.stream.filter` reads collections and scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from dcp.session.state import SessionState
from dcp.stream.producer import Producer
from dcp.stream.terms import MarkerVersion, Terms
from dcp.wire.frame import MAX_KEY_BYTES
from dcp.wire.status import RefusedError, Status
from failover.rules.history import FAILOVER_ENTRIES_MAX
from vbucket.model.datatype import SNAPPY

NOOP_INTERVAL_MIN_S: Final = 0.1
WINDOW_BYTES_MAX: Final = 2**32 - 1
_MARKER_VERSIONS: Final = {"2.0": MarkerVersion.V2_0, "2.2": MarkerVersion.V2_2}
_BOOLEANS: Final = frozenset({"true", "false"})
_DECIMAL: Final = frozenset("0123456789")

Setter = Callable[[Producer, SessionState, str], int]
"""Sets a property of the connection and returns OK, or returns the status of the refusal."""


def is_decimal(text: object) -> bool:
    """Whether this is a decimal number of at most 20 digits, as text."""
    return isinstance(text, str) and 0 < len(text) <= 20 and _DECIMAL.issuperset(text)


def _noop_interval(producer: Producer, _state: SessionState, value: str) -> int:
    try:
        interval_s = float(value)
    except ValueError:
        return Status.EINVAL
    if not NOOP_INTERVAL_MIN_S <= interval_s < 86_400:
        return Status.EINVAL
    producer.keepalive.interval_ns = int(interval_s * 1_000_000_000)
    return Status.OK


def _noop(producer: Producer, _state: SessionState, value: str) -> int:
    if value not in _BOOLEANS:
        return Status.EINVAL
    producer.keepalive.is_enabled = value == "true"
    return Status.OK


def _traceparent(producer: Producer, _state: SessionState, value: str) -> int:
    producer.traceparent = value
    return Status.OK


def _window(producer: Producer, _state: SessionState, value: str) -> int:
    if not is_decimal(value) or int(value) > WINDOW_BYTES_MAX:
        return Status.EINVAL
    producer.set_window(int(value))
    return Status.OK


def _stream_ids(producer: Producer, _state: SessionState, value: str) -> int:
    """Refused while streams are open, because those have no names."""
    if value != "true" or producer.stream_count:
        return Status.EINVAL
    producer.terms.has_stream_ids = True
    return Status.OK


def _history(producer: Producer, _state: SessionState, value: str) -> int:
    """It cannot be turned off again, as in kv_engine."""
    if value != "true":
        return Status.EINVAL
    producer.terms.has_history = True
    return Status.OK


def _deleted_user_xattrs(producer: Producer, _state: SessionState, value: str) -> int:
    """A question rather than a setting: DCP_OPEN flag 0x100 turns it on, as in kv_engine."""
    has_them = value == "true" and producer.terms.has_deleted_user_xattrs
    return Status.OK if has_them else Status.EINVAL


def _marker_version(producer: Producer, state: SessionState, value: str) -> int:
    if not state.hello.has_collections:
        return Status.NOT_SUPPORTED
    version = _MARKER_VERSIONS.get(value)
    if version is None:
        return Status.EINVAL
    producer.terms.marker_version = version
    return Status.OK


def _previous_values(producer: Producer, _state: SessionState, value: str) -> int:
    """Refused on connections without values (DCP_OPEN flags 0x08, 0x40)."""
    if value not in _BOOLEANS or (value == "true" and not producer.terms.has_values):
        return Status.EINVAL
    producer.terms.has_previous_values = value == "true"
    return Status.OK


def _value_compression(producer: Producer, state: SessionState, value: str) -> int:
    """Refused on connections without Snappy (HELLO 0x0a), as in kv_engine."""
    if value not in _BOOLEANS or not state.hello.datatypes & SNAPPY:
        return Status.EINVAL
    producer.terms.forces_compression = value == "true"
    return Status.OK


def _out_of_order(producer: Producer, _state: SessionState, value: str) -> int:
    """It cannot be turned off again, as in kv_engine. SEQNO_ADVANCED is sent with both values,
    because the marker names the end of the snapshot.
    """
    if value not in {"true", "true_with_seqno_advanced"}:
        return Status.EINVAL
    producer.terms.has_oso = True
    return Status.OK


def _closed_times(producer: Producer, state: SessionState, value: str) -> int:
    """It cannot be turned off again."""
    if value != "true":
        return Status.EINVAL
    why = "" if state.shared.replication is None else state.shared.replication.why_no_cuts
    if why:
        why = f"this node closes no times (control x_closed_times): {why}"
        raise RefusedError(Status.NOT_SUPPORTED, why)
    state.shared.hub.cutting[producer] = None
    return Status.OK


def _switch(name: str) -> Setter:
    """Return a setter that turns an attribute of the producer on and off."""

    def set_switch(producer: Producer, _state: SessionState, value: str) -> int:
        if value not in _BOOLEANS:
            return Status.EINVAL
        assert hasattr(producer, name)
        setattr(producer, name, value == "true")
        return Status.OK

    return set_switch


def _term(name: str) -> Setter:
    """Return a setter that turns a term on and off."""
    assert name in Terms.__slots__

    def set_term(producer: Producer, _state: SessionState, value: str) -> int:
        if value not in _BOOLEANS:
            return Status.EINVAL
        setattr(producer.terms, name, value == "true")
        return Status.OK

    return set_term


def _accept(*values: str) -> Setter:
    """Return a setter that only checks the value: this server behaves that way anyway."""

    def check(_producer: Producer, _state: SessionState, value: str) -> int:
        return Status.OK if not values or value in values else Status.EINVAL

    return check


def _not_supported(_producer: Producer, _state: SessionState, _value: str) -> int:
    return Status.NOT_SUPPORTED


CONTROLS: Final[dict[str, Setter]] = {
    "traceparent": _traceparent,
    "enable_noop": _noop,
    "set_noop_interval": _noop_interval,
    "connection_buffer_size": _window,
    "set_priority": _accept("high", "medium", "low"),
    "backfill_order": _accept("round-robin", "sequential"),
    "send_stream_end_on_client_close_stream": _switch("sends_end_on_close"),
    "enable_expiry_opcode": _switch("has_expiry_opcode"),
    "enable_stream_id": _stream_ids,
    "change_streams": _history,
    "force_value_compression": _value_compression,
    "enable_out_of_order_snapshots": _out_of_order,
    "max_marker_version": _marker_version,
    "v7_dcp_status_codes": _accept("true"),
    "consumer_name": _accept(),
    "supports_cursor_dropping": _accept(),
    "supports_cursor_dropping_vulcan": _accept(),
    "supports_hifi_MFU": _accept(),
    "include_deleted_user_xattrs": _deleted_user_xattrs,
    "x_version_log": _term("has_version_lists"),
    "x_exact_end": _term("has_exact_ends"),
    "x_snapshot_end": _term("has_snapshot_ends"),
    "x_previous_value": _previous_values,
    "x_key_prefix": _term("has_key_prefixes"),
    "x_from_replicas": _term("from_replicas"),
    "x_closed_times": _closed_times,
    "stream_buffer_size": _not_supported,
    "enable_sync_writes": _not_supported,
    "flatbuffers_system_events": _not_supported,
    "cache_transfer": _not_supported,
}
"""DCP_CONTROL key -> its setter."""


VALUE_BYTES_MAX: Final = 64 * 1024
"""Longest JSON value of a stream request; a list of 1,024 collections has about 10 KiB."""

STREAM_ID_MAX: Final = 0xFFFF
KEY_PREFIXES_MAX: Final = 64
"""Most prefixes in one request. Each change is compared with all of them."""
_U64_MAX: Final = 2**64 - 1


class StreamValue(NamedTuple):
    """What a stream request's value says."""

    document: dict[str, Any]
    purge_seqno: int = 0
    """The partition's purge seqno when the client got its data; 0: not given."""
    stream_id: int = 0
    """The stream's name on the wire; 0: it has none."""
    versions: tuple[tuple[int, int], ...] = ()
    """(vb_uuid, first seqno) of all versions that the client knows, newest first."""
    wants_version_log: bool = True
    """Whether the answer carries the whole failover log."""
    key_prefixes: tuple[bytes, ...] = ()
    """Prefixes of the keys that the client wants; (): all keys."""


NOTHING_TOLD: Final = StreamValue({})
"""No value, where the client need not name its stream."""


def parse_stream_value(value: bytes, terms: Terms) -> StreamValue:
    """Return what the value of a stream request says. Raises RefusedError."""
    document = _document(value)
    purge = document.get("purge_seqno", "0")
    if not is_decimal(purge):
        raise RefusedError(Status.EINVAL, "purge_seqno must be decimal text")
    stream_id = _stream_id(document, has_stream_ids=terms.has_stream_ids)
    prefixes = _prefixes(document.get("key_prefixes")) if terms.has_key_prefixes else ()
    if not terms.has_version_lists:
        return StreamValue(document, int(purge), stream_id, key_prefixes=prefixes)
    wants_log = document.get("want_version_log", True)
    if not isinstance(wants_log, bool):
        raise RefusedError(Status.EINVAL, "want_version_log must be true or false")
    versions = _versions(document.get("version_log", []))
    return StreamValue(document, int(purge), stream_id, versions, wants_log, prefixes)


def _document(value: bytes) -> dict[str, Any]:
    if not value:
        return {}
    if len(value) > VALUE_BYTES_MAX:
        raise RefusedError(Status.EINVAL, f"a stream filter has at most {VALUE_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(
            Status.EINVAL, f"the stream filter is not a JSON object: {error}"
        ) from error


def _stream_id(document: dict[str, Any], *, has_stream_ids: bool) -> int:
    if ("sid" in document) != has_stream_ids:
        raise RefusedError(
            Status.DCP_STREAMID_INVALID,
            'with control enable_stream_id every request names its stream ("sid": 1 to 65535)'
            if has_stream_ids
            else "stream ids need control enable_stream_id first",
        )
    if not has_stream_ids:
        return 0
    stream_id = document["sid"]
    if type(stream_id) is not int or not 0 <= stream_id <= STREAM_ID_MAX:
        raise RefusedError(Status.EINVAL, f"sid is a number, 1 to {STREAM_ID_MAX}")
    if not stream_id:
        raise RefusedError(Status.DCP_STREAMID_INVALID, "a stream id is not 0")
    return stream_id


def _prefixes(entries: object) -> tuple[bytes, ...]:
    """Return the key prefixes. They are hexadecimal, because JSON text cannot hold every key."""
    if entries is None:
        return ()
    wanted = f"key_prefixes is a list of 1 to {KEY_PREFIXES_MAX} keys' beginnings, hexadecimal"
    if not isinstance(entries, list) or not 0 < len(entries) <= KEY_PREFIXES_MAX:
        raise RefusedError(Status.EINVAL, wanted)
    prefixes = []
    for entry in entries:
        try:
            prefix = bytes.fromhex(entry) if isinstance(entry, str) else b""
        except ValueError:
            prefix = b""
        if not 0 < len(prefix) <= MAX_KEY_BYTES:
            raise RefusedError(Status.EINVAL, f"{wanted}; {entry!r} cannot be")
        prefixes.append(prefix)
    return tuple(prefixes)


def _versions(entries: object) -> tuple[tuple[int, int], ...]:
    """Return the checked version log: pairs, newest first."""
    wanted = 'version_log is [["<vb_uuid>", "<seqno>"], ...], decimal text, newest first'
    if not isinstance(entries, list):
        raise RefusedError(Status.EINVAL, wanted)
    if len(entries) > FAILOVER_ENTRIES_MAX:
        limit = f"at most {FAILOVER_ENTRIES_MAX}, as many as a failover log keeps"
        raise RefusedError(Status.EINVAL, f"{wanted}, {limit}; found {len(entries)}")
    versions: list[tuple[int, int]] = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2 or not all(map(is_decimal, entry)):
            raise RefusedError(Status.EINVAL, wanted)
        vb_uuid, seqno = int(entry[0]), int(entry[1])
        if not 0 < vb_uuid <= _U64_MAX or seqno > (versions[-1][1] if versions else _U64_MAX):
            raise RefusedError(Status.EINVAL, f"{wanted}; {vb_uuid} at {seqno} cannot be")
        versions.append((vb_uuid, seqno))
    return tuple(versions)
