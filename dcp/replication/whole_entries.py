"""Checks the entries of a whole commit group of a master, before any of it is applied. Pure.

Who calls it: `dcp.replication.replica_link`. The rules are those of
`dcp.replication.messages.problem_of`, which also has the words. Here they are checked in the order
of the log, without a section for each partition, and two are narrower: no entry is a control entry,
and all entries of a partition have the leader epoch in which it is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Final

from dcp.replication.messages import ENTRY_OVERHEAD_BYTES_MAX, EntriesSection, problem_of
from dcp.session.replication_port import ReplicationError
from dcp.wire.opcode import Opcode
from vbucket.engine.replicated import ReplicatedChange
from vbucket.model.entry import (
    DELETION_EXTRAS_BYTES,
    EXPIRATION_EXTRAS_BYTES,
    LOG_CONTROL,
    MUTATION_EXTRAS_BYTES,
    OPCODE_AT,
    PREFIX_BYTES,
    SYSTEM_EVENT_EXTRAS_BYTES,
)

_HEAD: Final = Struct(">QIxBHBxHI4xQQ")
"""prev seqno, epoch, opcode, key length, extras length, vbucket, body length, CAS, seqno."""
_unpack_head = _HEAD.unpack_from
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_EXTRAS_BYTES: Final[dict[int, int]] = {
    _MUTATION: MUTATION_EXTRAS_BYTES,
    int(Opcode.DCP_DELETION): DELETION_EXTRAS_BYTES,
    int(Opcode.DCP_EXPIRATION): EXPIRATION_EXTRAS_BYTES,
    _SYSTEM_EVENT: SYSTEM_EVENT_EXTRAS_BYTES,
}
_BODY_AT: Final = PREFIX_BYTES + 24
_SKIPPED: Final = -1
"""Instead of a seqno: the group is not for this partition."""


def checked_group(
    payload: bytes,
    highs: Mapping[int, int],
    epochs: Mapping[int, int],
    check_absent: Callable[[int], None],
    value_bytes_max: int,
) -> tuple[list[ReplicatedChange], dict[int, int]]:
    """Return the changes of a whole group that are to be applied, and partition -> end seqno.
    `payload` has its entries.

    `highs` has the high seqno of each partition that the group is for, `epochs` the leader epochs
    of these. `check_absent` raises ReplicationError if an entry of another partition cannot be; the
    others are skipped. Raises ReplicationError.
    """
    changes: list[ReplicatedChange] = []
    append = changes.append
    extras_bytes_of = _EXTRAS_BYTES.get
    ends: dict[int, int] = {}
    body_bytes_max = value_bytes_max + ENTRY_OVERHEAD_BYTES_MAX
    start, total = 0, len(payload)
    try:
        while start < total:
            prev_seqno, epoch, opcode, key_bytes, extras_bytes, vb_id, body, cas, seqno = (
                _unpack_head(payload, start)
            )
            body_at = start + _BODY_AT
            entry_at, start = start, body_at + body
            if start > total:
                raise ReplicationError(
                    f"an entry of {start - entry_at} bytes, and {total - entry_at} follow"
                )
            if vb_id in ends:
                high_seqno = ends[vb_id]
            elif vb_id in highs:
                high_seqno = highs[vb_id]
            else:
                check_absent(vb_id)
                ends[vb_id] = high_seqno = _SKIPPED
            if high_seqno < 0:
                continue
            if (
                seqno != high_seqno + 1
                or epoch != epochs[vb_id]
                or body > body_bytes_max
                or extras_bytes_of(opcode) != extras_bytes
                or not key_bytes
                or extras_bytes + key_bytes > body
                or prev_seqno >= seqno
                or not (cas or opcode == _SYSTEM_EVENT)
            ):
                entry = payload[entry_at:start]
                raise _refused(entry, vb_id, epochs[vb_id], high_seqno, value_bytes_max)
            ends[vb_id] = seqno
            key_at = body_at + extras_bytes
            append(
                (
                    vb_id, payload[key_at : key_at + key_bytes], payload[entry_at:start], seqno,
                    prev_seqno, cas, opcode == _MUTATION,
                )
            )  # fmt: skip
    except struct.error as error:
        raise ReplicationError(f"an entry is too short: {error}") from None
    if _SKIPPED in ends.values():
        ends = {vb_id: seqno for vb_id, seqno in ends.items() if seqno >= 0}
    return changes, ends


def _refused(
    entry: bytes, vb_id: int, epoch: int, high_seqno: int, value_bytes_max: int
) -> ReplicationError:
    if entry[OPCODE_AT] == LOG_CONTROL:
        return ReplicationError(f"vb {vb_id}: a control entry after seqno {high_seqno}")
    section = EntriesSection(vb_id, 0, epoch, 0, [entry])
    problem = problem_of(section, high_seqno, None, value_bytes_max)
    return ReplicationError(
        f"vb {vb_id}: "
        + (problem or f"the entry after seqno {high_seqno} is no change of leader epoch {epoch}")
    )
