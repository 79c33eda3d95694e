"""What to run to get the packages of an extra, for messages. Pure.

Documentation says the same; tests/system/test_release.py holds it against IS_PUBLISHED.
"""

from __future__ import annotations

from typing import Final

IS_PUBLISHED: Final = False
"""Whether `pip install dcpd` gets this project from the public index. Until then pip would find
nothing there, or something of somebody else."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra."""
    return hint_of(extra, is_published=IS_PUBLISHED)


def hint_of(extra: str, *, is_published: bool) -> str:
    """Return the command for a published project, or for a clone of its repository."""
    if is_published:
        return f"pip install 'dcpd[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of dcpd"
