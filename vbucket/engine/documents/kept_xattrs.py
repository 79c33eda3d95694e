"""The XATTRs that a document keeps when a command changes it without naming them.

A plain SET replaces the body and keeps all XATTRs; a deletion and an expiry keep the system ones,
so a deletion may have a value. A document that is stored again after its deletion begins without.

Who calls it: the engine. Rules: kv_engine's.
"""

from __future__ import annotations

from dcp.wire.frame import MAX_VALUE_BYTES
from dcp.wire.status import RefusedError, Status
from dcp.wire.xattrs import DATATYPE_XATTR, section_of, system_section
from vbucket.engine.partition import Partition
from vbucket.engine.versions import Versions
from vbucket.model.entry import DATATYPE_AT, expiry_of, value_of
from vbucket.store.key_record import StoredMeta


class KeptXattrs:
    """See the module."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def of_document(self, part: Partition, key: bytes, now_s: int) -> bytes:
        """Return the section of XATTRs of the present document; b"" if it has expired."""
        entry = self._entry(part, key)
        if 0 < expiry_of(entry) <= now_s:
            return b""
        return section_of(value_of(entry), entry[DATATYPE_AT])

    def of_removal(self, part: Partition, key: bytes, known: StoredMeta) -> bytes:
        """Return the section that outlives the newest version of a key, whose metadata is known."""
        if not known.datatype & DATATYPE_XATTR:
            return b""
        entry = self._entry(part, key)
        return system_section(section_of(value_of(entry), entry[DATATYPE_AT]))

    def _entry(self, part: Partition, key: bytes) -> bytes:
        entry = self._versions.newest_entry(part, key)
        assert entry, "its metadata was read"
        return entry


def with_xattrs(xattrs: bytes, body: bytes) -> bytes:
    """Return the value of a document with this section and body. Raises RefusedError."""
    value_bytes = len(xattrs) + len(body)
    if value_bytes > MAX_VALUE_BYTES:
        what = f"with its XATTRs the value has {value_bytes} bytes"
        raise RefusedError(Status.E2BIG, f"{what}; at most {MAX_VALUE_BYTES} fit")
    return xattrs + body
