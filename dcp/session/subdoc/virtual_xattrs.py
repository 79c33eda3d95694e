"""Virtual XATTRs, which tell of a document, and macros, which are replaced when it is stored. Pure.

    $document   CAS, seqno, version, expiry, size and so on of the document as it is
    $XTOC       the names of its XATTRs
    $vbucket    the clock of its partition

    "${Mutation.CAS}", "${Mutation.seqno}"   of the change that stores the macro
    "${Mutation.value_crc32c}"               the CRC-32C of the body after that change
    "${$document.NAME}", "${$document}"      of the document before it

Rules and formats: kv_engine's. The CAS of a mutation is written with its bytes reversed, as
kv_engine does and Sync Gateway expects; that of $document is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import google_crc32c

from dcp.wire.xattrs import is_system
from vbucket.model.ids import time_ns_from_cas

DOCUMENT: Final = b"$document"
XTOC: Final = b"$XTOC"
VBUCKET: Final = b"$vbucket"

_MUTATION_MACROS: Final = frozenset(
    {b'"${Mutation.CAS}"', b'"${Mutation.seqno}"', b'"${Mutation.value_crc32c}"'}
)
_DOCUMENT_MACRO: Final = b'"${$document'
_MACRO_END: Final = b'}"'
_crc32c = google_crc32c.value
_crc32c_extend = google_crc32c.extend
_PIECE_BYTES: Final = 1 << 16


class DocumentFacts(NamedTuple):
    """What $document tells of."""

    cas: int
    vb_uuid: int
    seqno: int
    rev_seqno: int
    expiry: int
    flags: int
    datatype: int
    is_deleted: bool
    body: bytes | memoryview


class ChangeFacts(NamedTuple):
    """What the macros of a mutation tell of."""

    cas: int
    seqno: int
    crc: int


def crc_of(body: bytes | memoryview) -> int:
    """Return the CRC-32C of a body."""
    crc: int = 0
    if isinstance(body, bytes):
        return int(_crc32c(body))
    for at in range(0, len(body), _PIECE_BYTES):  # it takes no view, and a copy may be large
        crc = _crc32c_extend(crc, bytes(body[at : at + _PIECE_BYTES]))
    return crc


def is_macro(value: bytes) -> bool:
    """Whether a value can be a macro."""
    return value in _MUTATION_MACROS or (
        value.startswith(_DOCUMENT_MACRO) and value.endswith(_MACRO_END)
    )


def document_xattr(facts: DocumentFacts) -> dict[str, Any]:
    """Return the value of $document."""
    names = [
        name for bit, name in ((1, "json"), (2, "snappy"), (4, "xattr")) if facts.datatype & bit
    ]
    return {
        "CAS": f"0x{facts.cas:016x}",
        "datatype": names or ["raw"],
        "deleted": facts.is_deleted,
        "exptime": facts.expiry,
        "flags": facts.flags,
        "last_modified": str(time_ns_from_cas(facts.cas) // 1_000_000_000),
        "revid": str(facts.rev_seqno),
        "seqno": f"0x{facts.seqno:016x}",
        "value_bytes": len(facts.body),
        "value_crc32c": f"0x{crc_of(facts.body):08x}",
        "vbucket_uuid": f"0x{facts.vb_uuid:016x}",
    }


def document_text(facts: DocumentFacts) -> bytes:
    """Return the JSON document that has $document only."""
    return json.dumps({DOCUMENT.decode(): document_xattr(facts)}).encode()


def names_text(names: Iterable[bytes], *, shows_system: bool) -> bytes:
    """Return the JSON document that has $XTOC only."""
    shown = [name.decode() for name in names if shows_system or not is_system(name)]
    return json.dumps({XTOC.decode(): shown}, ensure_ascii=False).encode()


def vbucket_text(now_ns: int, max_cas: int) -> bytes:
    """Return the JSON document that has $vbucket only."""
    is_real = now_ns > max_cas
    now_s = max(now_ns, time_ns_from_cas(max_cas)) // 1_000_000_000
    clock = {"mode": "real" if is_real else "logical", "now": str(now_s)}
    return json.dumps({VBUCKET.decode(): {"HLC": clock}}).encode()


def expanded(macro: bytes, change: ChangeFacts, before: DocumentFacts) -> bytes | None:
    """Return the JSON value that replaces a macro; None: there is no such one of $document."""
    if macro == b'"${Mutation.CAS}"':
        return b'"0x%b"' % change.cas.to_bytes(8, "little").hex().encode()
    if macro == b'"${Mutation.seqno}"':
        return b'"0x%016x"' % change.seqno
    if macro == b'"${Mutation.value_crc32c}"':
        return b'"0x%08x"' % change.crc
    found: Any = document_xattr(before)
    name = macro[len(_DOCUMENT_MACRO) : -len(_MACRO_END)].decode("utf-8", "replace")
    if name:
        found = found.get(name[1:]) if name.startswith(".") else None
    return None if found is None else json.dumps(found).encode()
