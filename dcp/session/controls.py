"""DCP_CONTROL: one table of the keys that a client may set, and their values.

An unknown key is answered with EINVAL, and a known one that this server does not support with
NOT_SUPPORTED. `x_` keys are this server's own (docs/streams.md), the others are kv_engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.session.state import SessionState
from dcp.stream.producer import Producer
from dcp.stream.terms import MarkerVersion, Terms
from dcp.wire.status import Status
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
    producer.noop_interval_ns = int(interval_s * 1_000_000_000)
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
    if not state.has_collections:
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
    if value not in _BOOLEANS or not state.datatypes & SNAPPY:
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
    "enable_noop": _switch("noop_is_enabled"),
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
    "stream_buffer_size": _not_supported,
    "enable_sync_writes": _not_supported,
    "flatbuffers_system_events": _not_supported,
    "cache_transfer": _not_supported,
}
"""DCP_CONTROL key -> its setter."""
