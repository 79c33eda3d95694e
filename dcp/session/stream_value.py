"""The JSON value of a stream request, except for its filter. Pure.

    {"uid": "0", "collections": [...], "scope": "...", "purge_seqno": "17",
     "sid": 3, "key_prefixes": ["<hexadecimal>", ...],
     "version_log": [["<vb_uuid>", "<seqno>"], ...], "want_version_log": false}

64-bit numbers are decimal text, because JSON readers round them. Unknown names are ignored. So are
`version_log` and `want_version_log` without control x_version_log, and `key_prefixes` without
x_key_prefix. `sid` needs enable_stream_id. `dcp.stream.filter` reads collections and scope.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from dcp.session.controls import is_decimal
from dcp.stream.terms import Terms
from dcp.wire.frame import MAX_KEY_BYTES
from dcp.wire.status import RefusedError, Status
from failover.rules.history import FAILOVER_ENTRIES_MAX

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


_NOTHING_TOLD: Final = StreamValue({})


def parse_stream_value(value: bytes, terms: Terms) -> StreamValue:
    """Return what the value of a stream request says. Raises RefusedError."""
    if not value and not terms.has_stream_ids:
        return _NOTHING_TOLD
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
