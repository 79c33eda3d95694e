"""Passwords in files: dcpctl takes none from the command line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_FOLDER = TemporaryDirectory(prefix="dcpd-passwords-")


@cache
def password_file(password: str) -> str:
    """Return the path of a file with this password, which is there until the process ends."""
    path = Path(_FOLDER.name) / f"{abs(hash(password))}"
    path.write_text(f"{password}\n")
    return str(path)


def new_password(password: str) -> tuple[str, str]:
    """Return the option of `dcpctl user add` for a password."""
    return "--new-password-file", password_file(password)


def with_password(password: str) -> tuple[str, str]:
    """Return the option of dcpctl for a password."""
    return "--password-file", password_file(password)
