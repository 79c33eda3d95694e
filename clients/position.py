"""A consumer's position in a partition, and the states that it can go back to. Pure.

Invariants of a `Position`
- snap_start <= seqno <= snap_end; all are equal between snapshots. A marker alone does not move
  them: they change with the first item of the snapshot, so a reconnect between the two asks for
  nothing that the server must refuse;
- `versions` are newest first, as the server sent them with the last accepted request. After a
  rollback there is none that began above the position;
- `complete` are rising, separate ranges (first seqno, last seqno). At every seqno in them the
  consumer held the whole state of the partition, and only there it can go back to: inside a
  snapshot that leaves seqnos out, older versions of keys are missing until its end. A range begins
  at the end of a snapshot and grows while seqnos come without a gap. Seqno 0 always counts;
- `collections` are the ids that the stream was opened for. An id is never used again, so a name
  that now means another collection is noticed;
- `filter` is what the user asked for when the stream was opened. Resuming with another filter is
  refused, because it would skip documents without notice.

`versions_of` reads the whole failover log of a partition from a server.

Old ranges are thinned out (`RANGES_MAX`), because most rollbacks are shallow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from dcp.wire.frame import Frame
from failover.rules.history import FAILOVER_ENTRIES_MAX, FAILOVER_ENTRIES_SHOWN

RANGES_MAX: Final = 128
"""Ranges remembered before they are thinned out."""
RANGES_NEWEST: Final = 16
"""The newest so many are never thinned out."""
Versions = tuple[tuple[int, int], ...]
Ranges = tuple[tuple[int, int], ...]
NAMED_MAX: Final = 5
"""How many collections or prefixes a message names."""


class Filter(NamedTuple):
    """Which documents a consumer follows. Equal filters select the same documents."""

    collections: tuple[str, ...] | None = None
    """Names, or ids such as "0x8". None for the default collection only, () for all."""
    key_prefixes: tuple[bytes, ...] = ()
    """() for all keys."""

    @classmethod
    def of(cls, collections: Iterable[str | int] | None, key_prefixes: Iterable[bytes]) -> Filter:
        """Return the filter, sorted and without prefixes that others cover."""
        kept: list[bytes] = []
        for prefix in sorted(set(key_prefixes)):
            if not kept or not prefix.startswith(kept[-1]):
                kept.append(prefix)
        if collections is None:
            return cls(None, tuple(kept))
        names = {item if isinstance(item, str) else f"0x{item:x}" for item in collections}
        return cls(tuple(sorted(names)), tuple(kept))

    def __str__(self) -> str:
        """Return it in words."""
        if self.collections is None:
            where = "the default collection"
        else:
            where = f"collections {_named(self.collections)}" if self.collections else "everything"
        if not self.key_prefixes:
            return where
        texts = [repr(prefix.decode(errors="backslashreplace")) for prefix in self.key_prefixes]
        return f"{where}, keys that begin with {_named(texts)}"


def _named(items: Sequence[str]) -> str:
    more = f" and {len(items) - NAMED_MAX} more" if len(items) > NAMED_MAX else ""
    return ", ".join(items[:NAMED_MAX]) + more


class Position(NamedTuple):
    """A consumer's position in one partition.

    It has the versions that the consumer knows, the last seqno, the snapshot that it is in, and the
    complete states that it can go back to. `encode_position` makes bytes of it.
    """

    versions: Versions = ()
    """(vb_uuid, seqno at which it began), newest first."""
    seqno: int = 0
    snap_start: int = 0
    snap_end: int = 0
    complete: Ranges = ()
    base_seqno: int = 0
    """The consumer began here and never asked for anything below (a start at "now")."""
    collections: tuple[int, ...] | None = None
    """Ids of the collections that were followed, () for all; None: not known."""
    filter: Filter | None = None
    """Which documents were followed up to here; None: not known."""

    @property
    def vb_uuid(self) -> int:
        """The version to name in a stream request; 0 at seqno 0 or if none is known."""
        return self.versions[0][0] if self.versions and self.seqno else 0


def thinned(complete: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the newest ranges, and of the older ones the newest of each power of two of age."""
    newest = complete[-1][1]
    older = {(newest - item[1]).bit_length(): item for item in complete[:-RANGES_NEWEST]}
    return sorted([*older.values(), *complete[-RANGES_NEWEST:]])


def rolled_back(
    position: Position, server_seqno: int, *, to_beginning: bool = False, is_exact: bool = False
) -> Position:
    """Return where to ask again after the server said ROLLBACK(`server_seqno`).

    That is the newest complete state at or below it, without versions that began above. If the
    server knows no version that it saw (it says 0), and older ones are left, the newest version is
    given up and the next older one is tried from where it ended, so the common part is not lost.
    This is not done if the answer `is_exact`, because the server saw all versions. The result is
    below `position` in seqno, or has the same seqno and fewer versions.
    """
    if to_beginning:
        return Position()
    versions = position.versions
    if server_seqno == 0 and len(versions) > 1 and not is_exact:
        limit, versions = min(versions[0][1], position.seqno), versions[1:]
    else:
        # If the server names our own seqno or one above, we would ask the same for ever.
        limit = min(server_seqno, position.seqno - 1)
    base_seqno = position.base_seqno
    if limit < base_seqno:
        # Begun at "now": nothing is held below the base, so any place there is a state of ours.
        complete: Ranges = ((limit, limit),)
        base_seqno = limit
    else:
        complete = clipped(position.complete, limit)
    seqno = complete[-1][1] if complete else 0
    kept = tuple(version for version in versions if version[1] <= seqno)
    if not kept or seqno <= 0:
        return Position()
    return Position(
        kept, seqno, seqno, seqno, complete, base_seqno, position.collections, position.filter
    )


def gone_back(position: Position, seqno: int) -> Position:
    """Return the newest complete state at or below `seqno`; the beginning if there is none."""
    complete = clipped(position.complete, seqno)
    at = complete[-1][1] if complete else 0
    if not at or at < position.base_seqno:
        return Position()
    versions = tuple(version for version in position.versions if version[1] <= at)
    if not versions:
        return Position()
    return Position(
        versions, at, at, at, complete, position.base_seqno, position.collections, position.filter
    )


def clipped(complete: Ranges, seqno: int) -> Ranges:
    """Return the ranges up to a seqno."""
    return tuple((first, min(last, seqno)) for first, last in complete if first <= seqno)


def rollback_reason(
    before: Position, server_seqno: int, to_seqno: int, server: Versions = ()
) -> str:
    """Return in words what happens to what a client holds of a partition that goes back. `server`:
    the server's versions, as far as it told them.
    """
    shared = min(max(server_seqno, to_seqno), before.seqno)
    done = []
    if before.seqno > shared:
        done.append(f"{_changes(shared, before.seqno)} undone")
    if shared > to_seqno:
        done.append(f"{_changes(to_seqno, shared)} sent again")
    why = f"history branched at seqno {server_seqno}"
    if not server_seqno:
        why = f"the server does not know version {before.vb_uuid}"
        if before.vb_uuid in dict(server):
            why = (
                f"deletions above seqno {before.seqno} are purged, which this consumer has not"
                " seen: they were not kept for it, or it was away beyond the limits of that"
                " (dcpctl consumer list)"
            )
    return f"{why}: {', '.join(done) or 'no change is undone'}"


def are_forgotten(known: Versions, server: Versions) -> bool:
    """Whether a server with this failover log may have had a client's versions, and has dropped the
    oldest of its own since. A shorter log is whole: then it is another history.
    """
    is_full = len(server) >= FAILOVER_ENTRIES_MAX
    return is_full and {each for each, _ in known}.isdisjoint(each for each, _ in server)


def _changes(after_seqno: int, last_seqno: int) -> str:
    """Return the changes above a seqno in words, with their verb."""
    if last_seqno == after_seqno + 1:
        return f"1 change (seqno {last_seqno}) is"
    count = last_seqno - after_seqno
    return f"{count:,} changes (seqnos {after_seqno + 1} to {last_seqno}) are"


def version_log_group(vb_id: int) -> bytes:
    """Return the STAT group of a partition's whole failover log: up to 200 versions.

    GET_FAILOVER_LOG and STAT `failovers` show the newest 25, as kv_engine has them. This group, an
    extension of dcpd, shows all. A DCP connection with control x_version_log gets them without it.
    A server that does not know the group has no more versions than it shows.
    """
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
