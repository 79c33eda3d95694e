"""The file of users: JSON, replaced as a whole, readable by its owner only.

Called by `dcp.server.access.users`.

    {"format_version": 3, "crc32c": ..., "decoy_key": ..., "users": {NAME: {
     "scram": {MECHANISM: keys},
     "roles": {ROLE: [{"prefix": TEXT, "collection": "scope.collection"}, ...]}}}}

A scope without prefix and collection means everything. The checksum covers `decoy_key` and `users`.
The file is kept twice (`dcp.server.files.kept_twice`), so an older one that is put back has no
effect. Earlier versions have users.json.newest beside it, with the digest of the newest one.
"""

from __future__ import annotations

import contextlib
import json
import os
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import google_crc32c

from dcp.server.files import TWIN_SUFFIX
from dcp.server.files.kept_twice import NEW_SUFFIX, NEWEST_SUFFIX, write_kept
from dcp.session.access.rights import Rights, Role, Scope
from dcp.session.access.scram import HASH_NAMES, ScramKeys

Stamp = tuple[int, int, int]
"""What changes when a file is replaced or written: time, size and inode."""
USERS_FORMAT_VERSION: Final = 3
_CHECKSUM: Final = "crc32c"
ITERATIONS_MAX: Final = 1_000_000
"""More would block the server for seconds at a login, so a file with more is damaged."""

Keys = Mapping[str, ScramKeys]
"""Mechanism -> keys."""


RESTORE_USERS: Final = (
    f"restore it from a copy, and delete users.json{TWIN_SUFFIX}; or delete both, and add the "
    "users again"
)
_TAKE_IT: Final = f"to take this one as it is, delete users.json{NEWEST_SUFFIX}"


class UsersFileError(Exception):
    """The file of users cannot be read or written; the text says what and why."""


class UsersHeldError(UsersFileError):
    """Users cannot be changed for a while; the text says why."""


class UserRecord(NamedTuple):
    """The stored data of one user."""

    keys: Keys
    rights: Rights


class UsersContent(NamedTuple):
    """The content of the file."""

    users: dict[str, UserRecord]
    decoy_key: bytes
    """Makes the salts of users that do not exist."""


def roles_document(rights: Rights) -> dict[str, list[dict[str, str]]]:
    """Return rights as JSON: role -> scopes."""
    return {
        role.value: [
            {
                **({"prefix": scope.prefix.decode()} if scope.prefix else {}),
                **({"collection": scope.collection} if scope.collection else {}),
            }
            for scope in scopes
        ]
        for role, scopes in rights.scopes().items()
    }


def parse_roles(document: Mapping[str, Any]) -> Rights:
    """Return the rights that `roles_document` wrote.

    Raises ValueError, TypeError or AttributeError for anything else.
    """
    return Rights(
        {
            Role(role): tuple(parse_scope(scope) for scope in scopes)
            for role, scopes in document.items()
            if scopes
        }
    )


def parse_scope(document: Mapping[str, Any]) -> Scope:
    """Return a scope. Raises ValueError, TypeError, AttributeError for anything else."""
    unknown = document.keys() - {"prefix", "collection"}
    if unknown:
        # It could be a restriction, so it must not be ignored.
        raise ValueError(f"unknown members {', '.join(sorted(unknown))} in a scope")
    prefix, collection = document.get("prefix", ""), document.get("collection")
    if not isinstance(prefix, str) or not isinstance(collection, str | None):
        raise TypeError("prefix and collection must be texts")
    return Scope(prefix.encode(), collection or None)


def stamp_of(path: Path) -> Stamp | None:
    """Return a value that changes when a file is replaced or written, None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def stamps_of(path: Path) -> tuple[object, object]:
    """Return what changes with the file of users, and with its twin."""
    return stamp_of(path), stamp_of(path.with_name(path.name + TWIN_SUFFIX))


def file_text(content: UsersContent) -> bytes:
    """Return the file's bytes."""
    content_document: dict[str, Any] = {
        "decoy_key": b64encode(content.decoy_key).decode(),
        "users": {
            name: {
                "scram": {mechanism: _keys_document(k) for mechanism, k in user.keys.items()},
                "roles": roles_document(user.rights),
            }
            for name, user in sorted(content.users.items())
        },
    }
    head = {
        "format_version": USERS_FORMAT_VERSION,
        _CHECKSUM: checksum_of(content_document),
    }
    return json.dumps(head | content_document, indent=1).encode() + b"\n"


def checksum_of(document: Mapping[str, Any]) -> str:
    """Return the checksum of a file's content; white space and order do not count."""
    content = {name: document[name] for name in ("decoy_key", "users")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{google_crc32c.value(text.encode()):08x}"


def _keys_document(keys: ScramKeys) -> dict[str, Any]:
    return {
        "salt": b64encode(keys.salt).decode(),
        "iterations": keys.iterations,
        "stored_key": b64encode(keys.stored_key).decode(),
        "server_key": b64encode(keys.server_key).decode(),
    }


def check_newest(path: Path, text: bytes) -> None:
    """Raise UsersFileError if a file without a seal is not the one that was written last."""
    newest = path.with_name(path.name + NEWEST_SUFFIX)
    try:
        digests = newest.read_text("ascii").split()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise UsersFileError(f"{newest}: cannot be read: {error}; {_TAKE_IT}") from error
    if sha256(text).hexdigest() not in digests:
        raise UsersFileError(
            f"{path}: is not the one that was written last, for example an older copy of it: users "
            f"and passwords may be as they were then. Put the newest one back; {_TAKE_IT}"
        )


def write_users(path: Path, text: bytes) -> None:
    """Replace the file. Raises OSError: nothing has changed."""
    write_kept(path, text)
    with contextlib.suppress(OSError):  # it counts for a file without a seal only
        path.with_name(path.name + NEWEST_SUFFIX).unlink(missing_ok=True)


def parse_file(path: Path, text: bytes) -> UsersContent:
    """Decode the file. Raises UsersFileError."""
    try:
        document = json.loads(text)
        version = document["format_version"]
        if version != USERS_FORMAT_VERSION:
            raise UsersFileError(
                f"{path}: has format version {version!r}, this dcpd knows {USERS_FORMAT_VERSION}; "
                "use the version that wrote it"
            )
        if document[_CHECKSUM] != checksum_of(document):
            raise ValueError("the checksum is wrong")
        return UsersContent(
            {
                name: UserRecord(
                    {m: _parse_keys(user["scram"][m]) for m in HASH_NAMES},
                    parse_roles(user["roles"]),
                )
                for name, user in document["users"].items()
            },
            b64decode(document["decoy_key"], validate=True),
        )
    except (ValueError, KeyError, TypeError, AttributeError, Base64Error) as error:
        raise UsersFileError(
            f"{path}: is damaged ({type(error).__name__}: {error}); {RESTORE_USERS}"
        ) from error


def _parse_keys(document: Mapping[str, Any]) -> ScramKeys:
    iterations = int(document["iterations"])
    if not 1 <= iterations <= ITERATIONS_MAX:
        raise ValueError(f"{iterations} iterations")
    return ScramKeys(
        b64decode(document["salt"], validate=True),
        iterations,
        b64decode(document["stored_key"], validate=True),
        b64decode(document["server_key"], validate=True),
    )


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file durably: a crash leaves either the old file or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(path.name + NEW_SUFFIX)
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
