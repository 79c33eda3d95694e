"""Where the saved contexts are. Without pathlib, because every command looks there."""

from __future__ import annotations

import os


def contexts_file() -> str:
    """Return the place of the file: in $XDG_CONFIG_HOME, by default ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a relative path is invalid and ignored.
    if not os.path.isabs(home):  # noqa: PTH117
        home = os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    return os.path.join(home, "dcpctl", "contexts.json")  # noqa: PTH118
