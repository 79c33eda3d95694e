"""dcpd from Python: key-value clients, consumers of changes, mirrors.

    from dcpd import Consumer, KvClient, Mirror, CheckpointFile, Mutation, Deletion, Rollback

What is named here is the public interface (docs/consumers.md), with `dcpd.testing` and
`dcpd.spark`. A name is imported when it is first used, so a program pays for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import clients as _clients
from clients import __all__

if TYPE_CHECKING:
    from clients import *  # noqa: F403 - what checkers see; `__all__` has the names
else:

    def __getattr__(name: str) -> Any:
        """Return a public name. Raises AttributeError if there is none like it."""
        if name in __all__:
            return getattr(_clients, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
