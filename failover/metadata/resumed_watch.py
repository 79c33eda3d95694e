"""A watch that its client resumes over new connections. Pure.

Who calls it: clients of metadata stores, which keep one for each watch of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from failover.metadata.metastore import WatchBatch, WatchMessage


class ResumedWatch:
    """A caller's watch, and where it goes on."""

    def __init__(
        self,
        prefix: bytes,
        from_revision: int,
        deliver: Callable[[WatchMessage], None],
        on_cancel: Callable[[], None],
    ) -> None:
        assert from_revision >= 1, "a watch names its first revision"
        self.prefix: Final = prefix
        self.next_revision = from_revision
        """Behind the last batch that the store sent."""
        self.is_over = False
        self._deliver = deliver
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        """End the watch: `deliver` is not called again."""
        if not self.is_over:
            self.is_over = True
            self._on_cancel()

    def hand_over(self, message: WatchMessage) -> None:
        """Deliver a message, unless the watch was cancelled meanwhile."""
        if not self.is_over:
            self.is_over = not isinstance(message, WatchBatch)
            self._deliver(message)
