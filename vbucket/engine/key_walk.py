"""A way through all keys of a partition, some at a time, while it is written to. Sans-IO.

Who calls it: flushes and `vbucket.engine.mending`.

Every key that had a version at or below `end_seqno` when the walk began comes at least once, one
that has several versions in memory more often. Memory first: what a merge moves on meanwhile is met
again in the store, never missed.
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
        """Versions in memory below it have been looked at."""
        self._after_key: bytes | None = None
        """The last key that was looked at in the store; None: memory is not through yet."""

    def take(self, keys_max: int) -> list[bytes]:
        """Return up to `keys_max` keys; none is left where there are none. Raises
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
