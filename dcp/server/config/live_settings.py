"""The settings as they are now: some can change while the server runs (`dcpctl config set`).

A part that can follow a change says so with `follow`; every other setting is read at the start
only. A change lasts until the process ends, because the file and the flags stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dcp.server.config.settings import Settings
from dcp.server.config.sources import OPTIONS


class LiveSettings:
    """See the module."""

    def __init__(self, settings: Settings) -> None:
        self.now = settings
        self._followers: dict[str, Callable[[Any], None]] = {}

    @property
    def keys(self) -> list[str]:
        """The settings that can change."""
        return sorted(self._followers)

    def follow(self, key: str, follower: Callable[[Any], None]) -> None:
        """Have changes of a setting told. `follower` raises ValueError for a value that cannot
        apply now, and then changes nothing.
        """
        assert key in OPTIONS, key
        assert key not in self._followers, key
        self._followers[key] = follower

    def change(self, key: str, text: str) -> None:
        """Change a setting, one of `keys`. Raises ValueError; then it stays as it was."""
        field, option = OPTIONS[key]
        value = option.parse(text, option)
        self._followers[key](value)
        self.now = msgspec.structs.replace(self.now, **{field: value})
