"""What a replica keeps in files before it cuts it off. Sans-IO.

    roll back? ── CutOff, the shell writes a file ── kept ──> next piece, or: cut it off
                                                  └─ not_kept ──> the same piece again

Who calls it: `failover.replication.following`. A truncation is refused (`is_kept` is false) until
the shell has reported every piece as kept. The link asks its master again meanwhile, and the
question comes back with each ROLLBACK. So a full disk holds up the truncation of that partition
only.

Invariants
- one piece of a partition is with the shell at a time;
- what was kept counts for the same history only: another version or another end begins anew.
"""

from __future__ import annotations

from failover.replication.effects import ReplicationEffect
from failover.replication.receipt import QUARANTINE_BYTES_MAX, CutOff
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition


class _Keeping:
    """How far the changes above a seqno of a partition are in files."""

    __slots__ = ("end", "from_seqno", "kept_seqno", "piece")

    def __init__(self, end: tuple[int, int], from_seqno: int) -> None:
        self.end = end
        """(version, last seqno) of the history that is cut."""
        self.from_seqno = self.kept_seqno = from_seqno
        self.piece: CutOff | None = None
        """What the shell writes now."""


class Quarantine:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        effects: list[ReplicationEffect],
        *,
        piece_bytes_max: int = QUARANTINE_BYTES_MAX,
    ) -> None:
        self._engine = engine
        self._effects = effects
        self._piece_bytes_max = piece_bytes_max
        self._keeping: dict[int, _Keeping] = {}

    def is_kept(self, part: Partition, epoch: int, seqno: int) -> bool:
        """Return whether all above a seqno is in files. If not, the next piece goes to the shell.

        `epoch` is that of the master that does not have it.
        """
        end = part.vb_uuid, part.high_seqno
        keeping = self._keeping.get(part.vb_id)
        if keeping is None or (keeping.end, keeping.from_seqno) != (end, seqno):
            keeping = self._keeping[part.vb_id] = _Keeping(end, seqno)
        if keeping.piece is None and keeping.kept_seqno < part.high_seqno:
            self._begin_piece(part, epoch, keeping)
        if keeping.kept_seqno < part.high_seqno:
            return False
        del self._keeping[part.vb_id]
        return True

    def _begin_piece(self, part: Partition, epoch: int, keeping: _Keeping) -> None:
        entries = self._engine.versions.entries(
            part, keeping.kept_seqno + 1, part.high_seqno, self._piece_bytes_max
        )
        if not entries:  # what was there is compacted away
            keeping.kept_seqno = part.high_seqno
            return
        keeping.piece = CutOff(part.vb_id, epoch, tuple(part.failover.pairs()), tuple(entries))
        self._effects.append(keeping.piece)

    def kept(self, piece: CutOff) -> None:
        """The file of a piece is on disk."""
        keeping = self._keeping.get(piece.vb_id)
        if keeping is not None and keeping.piece is piece:
            keeping.piece = None
            keeping.kept_seqno = piece.last_seqno

    def not_kept(self, piece: CutOff) -> None:
        """The file of a piece could not be written: it is tried again with the next ROLLBACK."""
        keeping = self._keeping.get(piece.vb_id)
        if keeping is not None and keeping.piece is piece:
            keeping.piece = None
