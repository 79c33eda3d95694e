"""A commit group: the changes that one record of the log holds. Pure.

Who calls it: the keyspace makes groups; the committer writes them to the log and returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vbucket.model.manifest import Manifest


class CommitGroup(NamedTuple):
    """All changes since the previous group."""

    number: int
    payload: bytes
    """Its entries. Append and sync them (`vbucket.log.writer`), then call `group_synced`."""
    high_seqnos: dict[int, int]
    """vb -> high seqno of each partition that the group changed."""
    branched: list[int]
    """Partitions whose failover log the group changed."""
    restated: list[int]
    """Partitions whose state the group changed."""
    entries: int
    changes: Sequence[bytes] = ()
    """The entries one by one, for replicas."""
    manifest: Manifest | None = None
    """The collections manifest if the group changed it."""
    has_control: bool = True
    """Whether it may have control entries, beside the high watermarks at its end."""
    has_watermarks: bool = False
    """Whether the last entry has high watermarks, which are for this node's log only."""
