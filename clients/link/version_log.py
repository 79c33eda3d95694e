"""The whole failover log of a partition: up to 200 versions. Pure.

GET_FAILOVER_LOG and STAT `failovers` show the newest 25, as kv_engine has them. STAT `version-log
VB`, an extension of dcpd, shows all. A DCP connection with control x_version_log gets them without
it. A server that does not know the group has no more versions than it shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp.wire.frame import Frame
from failover.rules.history import FAILOVER_ENTRIES_SHOWN


def version_log_group(vb_id: int) -> bytes:
    """Return the STAT group to ask for."""
    return b"version-log %d" % vb_id


def versions_of(answer: Sequence[Frame], vb_id: int) -> tuple[tuple[int, int], ...]:
    """Return (vb_uuid, seqno at which it began), newest first; () if the server does not tell."""
    rows = {frame.key.decode(): frame.value for frame in answer if not frame.status}
    name = f"vb_{vb_id}"
    try:
        count = int(rows.get(f"{name}:num_entries", b"0"))
        return tuple(
            (int(rows[f"{name}:{index}:id"]), int(rows[f"{name}:{index}:seq"]))
            for index in range(count)
        )
    except (KeyError, ValueError):
        return ()


def may_be_longer(shown: Sequence[tuple[int, int]]) -> bool:
    """Whether a server may have more versions than it showed to a plain client."""
    return len(shown) >= FAILOVER_ENTRIES_SHOWN
