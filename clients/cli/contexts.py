"""Saved contexts: servers with credentials, under names, in one file of the user.

    $XDG_CONFIG_HOME/dcpctl/contexts.json, or ~/.config/dcpctl/contexts.json
    {"v": 1, "current": "prod", "contexts": {"prod": {"server": ..., "user": ..., ...}}}

Invariants
- the file is readable by its owner only (0600), from its first byte on, because it has passwords;
- it is replaced as a whole, so a crash leaves the old or the new one;
- a file that cannot be read is an error, and is not overwritten.

Every command looks for the file, so this module imports json only if there is one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from clients.cli.contexts_place import contexts_file
from clients.errors import DcpdError

FORMAT_VERSION: Final = 1
FILE_BYTES_MAX: Final = 1 << 20
"""A longer file is not one of ours. One context has about 200 bytes."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")


class ContextError(DcpdError):
    """A context cannot be read, used or saved. The text says why."""


class ContextMissingError(ContextError):
    """There is no context of that name."""

    exit_code = 3
    default_hint = "dcpctl context list shows all."


class ContextExistsError(ContextError):
    """There is a context of that name already."""

    exit_code = 4
    default_hint = "Use --replace, or another name."


class SavedContext(NamedTuple):
    """A server and how to log in. None: the default; for the password: ask for it."""

    server: str
    user: str | None = None
    password: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None


class Contexts(NamedTuple):
    """The content of the file."""

    current: str | None
    saved: Mapping[str, SavedContext]

    def named(self, name: str) -> SavedContext:
        """Return a context. Raises ContextMissingError."""
        found = self.saved.get(name)
        if found is None:
            from difflib import get_close_matches

            similar = get_close_matches(name, self.saved, n=1)
            raise ContextMissingError(
                f"there is no context {name!r} in {contexts_path()}",
                hint=f"Did you mean {similar[0]!r}?" if similar else None,
            )
        return found


EMPTY: Final = Contexts(None, {})


def contexts_path() -> Path:
    """Return the place of the file."""
    return Path(contexts_file())


def load_contexts() -> Contexts:
    """Read the file; without one there are no contexts. Raises ContextError."""
    path = contexts_path()
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return EMPTY
    except OSError as error:
        raise ContextError(f"{path}: cannot be read: {error.strerror}") from error
    import json

    try:
        document = json.loads(raw)
        if len(raw) > FILE_BYTES_MAX or document["v"] != FORMAT_VERSION:
            raise ValueError(f"its version is {document['v']!r}, not {FORMAT_VERSION}")
        saved = {name: _context_of(fields) for name, fields in document["contexts"].items()}
        current = document["current"]
        if current is not None and current not in saved:
            raise ValueError(f"the current context {current!r} is missing")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ContextError(
            f"{path}: not a file of contexts: {error}",
            hint="Repair it, or move it away and add the contexts again.",
        ) from error
    return Contexts(current, saved)


def _context_of(fields: Any) -> SavedContext:
    values: list[object] = list(fields.values())
    if not all(isinstance(value, str) for value in values):
        raise TypeError("every field of a context is a text")
    return SavedContext(**fields)


def save_contexts(contexts: Contexts) -> None:
    """Replace the file. Raises ContextError."""
    import json

    path = contexts_path()
    document = {
        "v": FORMAT_VERSION,
        "current": contexts.current,
        "contexts": {
            name: {key: value for key, value in context._asdict().items() if value is not None}
            for name, context in sorted(contexts.saved.items())
        },
    }
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                json.dump(document, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ContextError(f"{path}: cannot be written: {error.strerror}") from error


def checked_name(name: str) -> str:
    """Return a name that a context may have. Raises ContextError."""
    if not _NAME.fullmatch(name):
        raise ContextError(
            f"the name {name!r} is not allowed: 1 to 64 letters, digits and _ . @ -"
            " (a letter, digit or _ first)"
        )
    return name
