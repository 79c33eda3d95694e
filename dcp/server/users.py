"""Who may log in: the built-in guest from this machine, and users kept in a file.

Called by sessions (as their `Authenticator`), by the admin API and at start-up (protected mode).

Invariants
- a password is never stored and never logged, only SCRAM keys (dcp.session.scram);
- an unknown user goes through the same exchange as a known one, with keys that nothing matches and
  a salt that stays the same, so that neither answers nor their time tell who exists;
- the file is replaced as a whole, readable by its owner only; a file that is damaged or of another
  format is never overwritten, and what was read before it broke stays in force.

The built-in guest/guest works from loopback only (RabbitMQ's precedent); the name is reserved.
A file's user is an object, so that later versions can keep more beside its keys.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp.server.logging_setup import LOGGER_NAME
from dcp.session.auth import AuthStep
from dcp.session.scram import (
    HASH_NAMES,
    MalformedMessageError,
    ScramExchange,
    ScramKeys,
    begin_exchange,
    finish_exchange,
    keys_of_password,
    password_matches,
    read_client_first,
)
from dcp.wire.status import Status

USERS_FILE: Final = "users.json"
"""Name of the file in the data folder."""
USERS_FORMAT_VERSION: Final = 1

GUEST: Final = "guest"
GUEST_PASSWORD: Final = "guest"  # noqa: S105 - public on purpose, loopback only
PLAIN: Final = "PLAIN"
_PLAIN_KEYS: Final = "SCRAM-SHA512"
"""The keys that a password itself is checked against."""

ITERATIONS: Final = 10_000
"""PBKDF2 rounds for new users: 5 ms of SHA-512, once when added and once per new PLAIN login."""
ITERATIONS_MAX: Final = 1_000_000
"""More would stop the server for seconds at a login; a file that says so is damaged."""
GUEST_ITERATIONS: Final = 4096
"""The least that RFC 7677 allows: the password is known anyway."""
SALT_BYTES: Final = 16
USERS_MAX: Final = 10_000
PASSWORD_CHARS_MIN: Final = 6
PASSWORD_CHARS_MAX: Final = 128
VERIFIED_MAX: Final = 1024
"""Remembered PLAIN logins, so that clients that connect often cost no PBKDF2 each time."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_PASSWORD: Final = re.compile(r"[ -~]*")

_LOG: Final = logging.getLogger(LOGGER_NAME)

Keys = Mapping[str, ScramKeys]
"""Mechanism -> keys."""


class UserError(Exception):
    """A user cannot be added or removed; the text says why and what to do."""


class UsersFileError(Exception):
    """The file of users cannot be read or written; the text says what and why."""


class _LoginAttempt(NamedTuple):
    """A SCRAM exchange, and whether its user exists."""

    exchange: ScramExchange
    user: str
    is_known: bool


class _FileContent(NamedTuple):
    users: dict[str, Keys]
    decoy_key: bytes
    """Makes the salts of users that do not exist."""


class Users:
    """The users of one server. `add` and `remove` may be called from any thread."""

    def __init__(
        self, path: Path, draw_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        """Read the file; a missing one means that there is only the guest.

        Raises:
            UsersFileError: it is there and cannot be used.
        """
        self._path = path
        self._draw_bytes = draw_bytes
        self._change = threading.Lock()
        self._process_key = draw_bytes(32)
        self._verified: set[bytes] = set()
        self._stamp: tuple[int, int, int] | None = None
        self._content = _FileContent({}, draw_bytes(32))
        self.problem = ""
        """Why the file's last change was not taken over; "" if it was."""
        self._guest_salt = draw_bytes(SALT_BYTES)
        self._guest_keys: dict[str, ScramKeys] = {}
        self._load()

    # -- the table -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the users that were added, sorted; the guest is not among them."""
        self._reload_if_changed()
        return sorted(self._content.users)

    def add(self, name: str, password: str) -> None:
        """Add a user, or give one a new password. Durable when it returns.

        Raises:
            UserError: the name or the password is not allowed.
            UsersFileError: the file cannot be written.
        """
        _check_name(name)
        _check_password(password)
        keys = {
            mechanism: keys_of_password(
                mechanism, password, salt=self._draw_bytes(SALT_BYTES), iterations=ITERATIONS
            )
            for mechanism in HASH_NAMES
        }
        with self._change:
            self._load()
            if name not in self._content.users and len(self._content.users) >= USERS_MAX:
                raise UserError(f"there are {USERS_MAX} users already, the limit")
            self._write({**self._content.users, name: keys})

    def remove(self, name: str) -> bool:
        """Remove a user; return whether there was one. Connections that are logged in stay.

        Raises:
            UserError: the guest cannot be removed.
            UsersFileError: the file cannot be written.
        """
        if name == GUEST:
            raise UserError("guest is built in (it works from this machine only)")
        with self._change:
            self._load()
            if name not in self._content.users:
                return False
            self._write({other: k for other, k in self._content.users.items() if other != name})
        return True

    def is_password_of(self, name: str, password: str, *, peer_is_loopback: bool) -> bool:
        """Return whether a user may log in with a password from there."""
        self._reload_if_changed()
        if name == GUEST and peer_is_loopback:
            return hmac.compare_digest(password.encode(), GUEST_PASSWORD.encode())
        keys, is_known = self._keys_of(name, _PLAIN_KEYS, peer_is_loopback=peer_is_loopback)
        # The stored key is part of the digest: a new password makes the old memory worthless.
        memory = hmac.digest(
            self._process_key,
            b"\0".join((name.encode(), password.encode(), keys.stored_key)),
            "sha256",
        )
        if memory in self._verified:
            return True
        matches = password_matches(_PLAIN_KEYS, password, keys)
        if not (matches and is_known):
            return False
        if len(self._verified) >= VERIFIED_MAX:
            self._verified.clear()
        self._verified.add(memory)
        return True

    # -- dcp.session.auth.Authenticator ----------------------------------------------------------

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:  # noqa: ARG002 - the same for all
        """Return the mechanisms on offer. SDKs insist on SCRAM-SHA512, simple clients on PLAIN."""
        return [*HASH_NAMES, PLAIN]

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
        """Begin an exchange."""
        if mechanism == PLAIN:
            return self._plain(initial, peer_is_loopback=peer_is_loopback)
        if mechanism not in HASH_NAMES:
            return AuthStep(Status.AUTH_ERROR)
        self._reload_if_changed()
        try:
            first = read_client_first(initial)
        except MalformedMessageError:
            return AuthStep(Status.EINVAL)
        keys, is_known = self._keys_of(first.user, mechanism, peer_is_loopback=peer_is_loopback)
        nonce = b64encode(self._draw_bytes(18)).decode()
        exchange = begin_exchange(mechanism, first, keys, nonce)
        attempt = _LoginAttempt(exchange, first.user, is_known)
        return AuthStep(Status.AUTH_CONTINUE, exchange.server_first.encode(), attempt)

    def step(self, exchange: object, message: bytes) -> AuthStep:
        """Finish an exchange."""
        assert isinstance(exchange, _LoginAttempt), "an exchange that start() did not make"
        try:
            answer = finish_exchange(exchange.exchange, message)
        except MalformedMessageError:
            return AuthStep(Status.EINVAL)
        if answer is None or not exchange.is_known:
            return AuthStep(Status.AUTH_ERROR)
        return AuthStep(Status.OK, answer, user=exchange.user)

    def _plain(self, message: bytes, *, peer_is_loopback: bool) -> AuthStep:
        parts = message.split(b"\0")
        if len(parts) != 3:
            return AuthStep(Status.EINVAL)
        try:
            authzid, name, password = (part.decode() for part in parts)
        except UnicodeDecodeError:
            return AuthStep(Status.AUTH_ERROR)
        if authzid not in {"", name} or len(password) > PASSWORD_CHARS_MAX:
            return AuthStep(Status.AUTH_ERROR)
        if not self.is_password_of(name, password, peer_is_loopback=peer_is_loopback):
            return AuthStep(Status.AUTH_ERROR)
        return AuthStep(Status.OK, user=name)

    # -- keys ------------------------------------------------------------------------------------

    def _keys_of(
        self, name: str, mechanism: str, *, peer_is_loopback: bool
    ) -> tuple[ScramKeys, bool]:
        """Return keys for whatever name, and whether they are those of a user."""
        if name == GUEST and peer_is_loopback:
            return self._keys_of_guest(mechanism), True
        known = self._content.users.get(name)
        if known is not None:
            return known[mechanism], True
        size = hashlib.new(HASH_NAMES[mechanism]).digest_size
        seed = hmac.digest(self._content.decoy_key, f"{mechanism} {name}".encode(), "sha256")
        # No password has a stored key of zeros, and `is_known` is False besides.
        return ScramKeys(seed[:SALT_BYTES], ITERATIONS, bytes(size), bytes(size)), False

    def _keys_of_guest(self, mechanism: str) -> ScramKeys:
        keys = self._guest_keys.get(mechanism)
        if keys is None:
            keys = keys_of_password(
                mechanism, GUEST_PASSWORD, salt=self._guest_salt, iterations=GUEST_ITERATIONS
            )
            self._guest_keys[mechanism] = keys
        return keys

    # -- the file --------------------------------------------------------------------------------

    def _reload_if_changed(self) -> None:
        if _stamp_of(self._path) == self._stamp:
            return
        try:
            self._load()
            self.problem = ""
        except UsersFileError as error:
            self.problem = str(error)
            _LOG.warning("users file not taken over", extra={"fields": {"reason": str(error)}})

    def _load(self) -> None:
        # The stamp is taken first: a change in between is seen the next time.
        self._stamp = _stamp_of(self._path)
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            self._content = _FileContent({}, self._content.decoy_key)
            return
        except OSError as error:
            raise UsersFileError(f"{self._path}: cannot be read: {error.strerror}") from error
        self._content = _parse_file(self._path, text)

    def _write(self, users: dict[str, Keys]) -> None:
        content = _FileContent(users, self._content.decoy_key)
        try:
            _replace_file(self._path, _file_text(content))
        except OSError as error:
            raise UsersFileError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._stamp = _stamp_of(self._path)
        self._content = content


def _check_name(name: str) -> None:
    if name == GUEST:
        raise UserError("the name guest is reserved for the built-in user; choose another")
    if not _NAME.fullmatch(name):
        raise UserError(
            f"the name {name!r} is not allowed: 1 to 64 letters, digits and _ . @ - "
            "(a letter, digit or _ first)"
        )


def _check_password(password: str) -> None:
    if not PASSWORD_CHARS_MIN <= len(password) <= PASSWORD_CHARS_MAX:
        raise UserError(
            f"the password has {len(password)} characters; "
            f"{PASSWORD_CHARS_MIN} to {PASSWORD_CHARS_MAX} are allowed"
        )
    if not _PASSWORD.fullmatch(password):
        raise UserError(
            "the password may hold printable ASCII only: clients disagree on how other "
            "characters are normalised (RFC 4013), and some could not log in"
        )


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _file_text(content: _FileContent) -> bytes:
    document = {
        "format_version": USERS_FORMAT_VERSION,
        "decoy_key": b64encode(content.decoy_key).decode(),
        "users": {
            name: {"scram": {mechanism: _keys_document(k) for mechanism, k in keys.items()}}
            for name, keys in sorted(content.users.items())
        },
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _keys_document(keys: ScramKeys) -> dict[str, Any]:
    return {
        "salt": b64encode(keys.salt).decode(),
        "iterations": keys.iterations,
        "stored_key": b64encode(keys.stored_key).decode(),
        "server_key": b64encode(keys.server_key).decode(),
    }


def _parse_file(path: Path, text: bytes) -> _FileContent:
    try:
        document = json.loads(text)
        version = document["format_version"]
        if version != USERS_FORMAT_VERSION:
            raise UsersFileError(
                f"{path}: has format version {version!r}, this dcpd knows {USERS_FORMAT_VERSION}; "
                "use the version that wrote it"
            )
        return _FileContent(
            {
                name: {mechanism: _parse_keys(user["scram"][mechanism]) for mechanism in HASH_NAMES}
                for name, user in document["users"].items()
            },
            b64decode(document["decoy_key"], validate=True),
        )
    except (ValueError, KeyError, TypeError, AttributeError, Base64Error) as error:
        raise UsersFileError(
            f"{path}: is damaged ({type(error).__name__}: {error}); restore it from a copy, or "
            "delete it and add the users again"
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


def _replace_file(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one, whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
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
