"""Walks all keys of a partition in steps, while it takes writes. Sans-IO.

Who calls it: flushes and `vbucket.engine.mending`.

Every key that had a version at or below `end_seqno` when the walk began is returned at least once,
more often if it has several versions in memory. Memory comes first. What a merge moves to the store
meanwhile is found again there, so no key is missed.
"""

from __future__ import annotations

from vbucket.engine.engine import Engine


class KeyWalk:
    """See the module."""

    def __init__(self, engine: Engine, vb_id: int, end_seqno: int) -> None:
        self._engine = engine
        self._vb_id = vb_id
        self._end_seqno = end_seqno
        self._next_seqno = 1
        """All versions in memory below it were visited."""
        self._after_key: bytes | None = None
        """The last key visited in the store; None: memory is not finished yet."""

    def take(self, keys_max: int) -> list[bytes]:
        """Return up to `keys_max` keys; an empty list means that all were visited. Raises
        StoreDamagedError.
        """
        if self._after_key is None:
            found = self._engine.versions.keys_in_memory(
                self._vb_id, self._next_seqno, self._end_seqno, keys_max
            )
            if found:
                self._next_seqno = found[-1][0] + 1
                return [key for _, key in found]
            self._after_key = b""
        keys = self._engine.versions.keys_in_store(self._vb_id, self._after_key, keys_max)
        if keys:
            self._after_key = keys[-1]
        return keys
