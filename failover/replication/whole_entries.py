"""Checks the entries of a whole commit group of a master, before any of it is applied. Pure.

Who calls it: `failover.replication.replica_link`. The rules are those of
`failover.replication.messages.problem_of`, which also has the words. Here they are checked in the
order of the log, without a section for each partition, and two are narrower: no entry is a control
entry, and all entries of a partition have the leader epoch in which it is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Final

from dcp.session.replication_port import ReplicationError
from dcp.wire.opcode import Opcode
from failover.replication.messages import ENTRY_OVERHEAD_BYTES_MAX, EntriesSection, problem_of
from vbucket.engine.replicated import ReplicatedChange
from vbucket.model.entry import (
    DELETION_EXTRAS_BYTES,
    EXPIRATION_EXTRAS_BYTES,
    LOG_CONTROL,
    MUTATION_EXTRAS_BYTES,
    OPCODE_AT,
    PREFIX_BYTES,
    SYSTEM_EVENT_EXTRAS_BYTES,
    vb_id_of,
)

_HEAD: Final = Struct(">QIxBHBxHI4xQQ")
"""prev seqno, epoch, opcode, key length, extras length, vbucket, body length, CAS, seqno."""
_unpack_head = _HEAD.unpack_from
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_SYSTEM_EVENT: Final = int(Opcode.DCP_SYSTEM_EVENT)
_OTHER_EXTRAS_BYTES: Final[dict[int, int]] = {
    int(Opcode.DCP_DELETION): DELETION_EXTRAS_BYTES,
    int(Opcode.DCP_EXPIRATION): EXPIRATION_EXTRAS_BYTES,
    _SYSTEM_EVENT: SYSTEM_EVENT_EXTRAS_BYTES,
}
_BODY_AT: Final = PREFIX_BYTES + 24


def checked_group(
    payload: bytes,
    highs: dict[int, int],
    epochs: Mapping[int, int],
    check_absent: Callable[[int], None],
    value_bytes_max: int,
) -> tuple[list[ReplicatedChange], dict[int, int]]:
    """Return the changes of a whole group that are to be applied, and partition -> end seqno.
    `payload` has its entries.

    `highs` has the high seqno of each partition that the group is for, and is raised; `epochs` has
    the leader epochs of these. `check_absent` raises ReplicationError if an entry of another
    partition cannot be; else it is skipped. Raises ReplicationError; `highs` is of no use then.
    """
    changes: list[ReplicatedChange] = []
    append = changes.append
    ends: dict[int, int] = {}
    body_bytes_max = value_bytes_max + ENTRY_OVERHEAD_BYTES_MAX
    start, total = 0, len(payload)
    try:
        while start < total:
            prev_seqno, epoch, opcode, key_bytes, extras_bytes, vb_id, body, cas, seqno = (
                _unpack_head(payload, start)
            )
            end = start + _BODY_AT + body
            if vb_id not in highs:
                check_absent(vb_id)
            elif (
                seqno == highs[vb_id] + 1
                and epoch == epochs[vb_id]
                and prev_seqno < seqno
                and (extras_bytes == MUTATION_EXTRAS_BYTES if opcode == _MUTATION
                     else extras_bytes == _OTHER_EXTRAS_BYTES.get(opcode))
                and 0 < key_bytes <= body - extras_bytes
                and body <= body_bytes_max
                and end <= total
                and (cas or opcode == _SYSTEM_EVENT)
            ):  # fmt: skip
                highs[vb_id] = ends[vb_id] = seqno
                key_at = start + _BODY_AT + extras_bytes
                append(
                    (
                        vb_id, payload[key_at : key_at + key_bytes], payload[start:end], seqno,
                        prev_seqno, cas, opcode == _MUTATION,
                    )
                )  # fmt: skip
            else:
                entry = payload[start:end]
                raise _refused(entry, end - start, epochs[vb_id], highs[vb_id], value_bytes_max)
            start = end
    except struct.error as error:
        raise ReplicationError(f"an entry is too short: {error}") from None
    if start > total:
        raise ReplicationError(f"an entry reaches {start - total} bytes beyond the end")
    return changes, ends


def _refused(
    entry: bytes, entry_bytes: int, epoch: int, high_seqno: int, value_bytes_max: int
) -> ReplicationError:
    vb_id = vb_id_of(entry)
    if entry[OPCODE_AT] == LOG_CONTROL:
        return ReplicationError(f"vb {vb_id}: a control entry after seqno {high_seqno}")
    section = EntriesSection(vb_id, 0, epoch, 0, [entry])
    problem = problem_of(section, high_seqno, None, value_bytes_max)
    if not problem and len(entry) < entry_bytes:
        problem = f"an entry of {entry_bytes} bytes after seqno {high_seqno}; {len(entry)} follow"
    return ReplicationError(
        f"vb {vb_id}: "
        + (problem or f"the entry after seqno {high_seqno} is no change of leader epoch {epoch}")
    )
