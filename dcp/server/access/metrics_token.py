"""The token that may read /metrics, and nothing else: the content of a file.

A scraper needs no user with it. The file is read again when it changes, so a token can be replaced
while the server runs.

Invariants
- a token has TOKEN_CHARS_MIN characters or more, so it cannot be guessed over the network;
- comparing takes the same time for every wrong token of the same length.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Final

from dcp.server.access.users_file import stamp_of

TOKEN_CHARS_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 4096
"""Of the file; a header of HTTP could carry more, but no token is that long."""


class TokenError(Exception):
    """The file has no token that can be used; the text says why and what to do."""


class MetricsToken:
    """See the module."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises TokenError."""
        self._path = path
        self._stamp = stamp_of(path)
        self._token = _read_token(path)

    def allows(self, token: str) -> bool:
        """Return whether this is the token."""
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token)

    def reload_if_changed(self) -> bool:
        """Read the file again if it has changed; return whether it has.

        Raises TokenError, once per change of the file. The old token stays then.
        """
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self._token = _read_token(self._path)
        return True


def _read_token(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        why = error.strerror or error
        raise TokenError(f"metrics token {path} cannot be read: {why}") from error
    token = text.strip()
    if len(text) > TOKEN_BYTES_MAX or not token.isascii() or len(token.split()) != 1:
        raise TokenError(f"metrics token {path} must hold one word of ASCII characters")
    if len(token) < TOKEN_CHARS_MIN:
        raise TokenError(
            f"metrics token {path} is shorter than {TOKEN_CHARS_MIN} characters; a good one: "
            "openssl rand -hex 32"
        )
    return token
