"""Who may log in: the built-in guest from this machine, and users kept in a file.

Called by logins (dcp.server.access.logins), by the admin API and at start-up (protected mode).

Invariants
- a password is never stored and never logged, only SCRAM keys (dcp.session.access.scram);
- an unknown user gets the same exchange as a known one, with keys that no password matches and a
  constant salt. So neither answers nor their timing show who exists;
- the file (dcp.server.access.users_file) is replaced as a whole. A damaged file, or one of another
  format, is not overwritten, and the users that were read before stay valid;
- `revision` grows with every change of users or their rights.

The built-in guest/guest works from loopback only (as in RabbitMQ) and may do everything; it
can be switched off. The name is reserved.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import threading
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_bytes
from typing import Final, NamedTuple

from dcp.server.access.users_file import (
    RESTORE_USERS,
    UserRecord,
    UsersContent,
    UsersFileError,
    UsersHeldError,
    check_newest,
    file_text,
    parse_file,
    stamps_of,
    write_users,
)
from dcp.server.files.kept_twice import FileDamagedError, read_kept
from dcp.server.observe.event_log import LOGGER_NAME
from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import EVERYTHING, FULL_RIGHTS, Rights, Role, Scope
from dcp.session.access.scram import (
    HASH_NAMES,
    MESSAGE_BYTES_MAX,
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

GUEST: Final = "guest"
GUEST_PASSWORD: Final = "guest"  # noqa: S105 - public on purpose, loopback only
CLUSTER_USER: Final = "@cluster"
"""The nodes of a cluster log in at each other with this name, followed by `/` and their own. No
user can have it."""
_NODE_USER: Final = re.compile(rf"{CLUSTER_USER}(/[A-Za-z0-9._-]{{1,64}})?")
PLAIN: Final = "PLAIN"
_PLAIN_KEYS: Final = "SCRAM-SHA512"
"""The keys that a PLAIN password is checked against."""

ITERATIONS: Final = 10_000
"""PBKDF2 rounds for new users: 5 ms of SHA-512, once when added and once per new PLAIN login."""
GUEST_ITERATIONS: Final = 4096
"""The least that RFC 7677 allows: the password is known anyway."""
SALT_BYTES: Final = 16
USERS_MAX: Final = 10_000
PASSWORD_CHARS_MIN: Final = 6
PASSWORD_CHARS_MAX: Final = 128
VERIFIED_MAX: Final = 1024
"""Remembered PLAIN logins, so clients that connect often do not cost a PBKDF2 each time."""

LEAST_RIGHTS: Final = Rights({Role.READ: (EVERYTHING,)})
"""What a new user may do if nobody says more."""
_CLUSTER_RIGHTS: Final = Rights({Role.REPLICATE: (EVERYTHING,)})
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_PASSWORD: Final = re.compile(r"[ -~]*")

_LOG: Final = logging.getLogger(LOGGER_NAME)


class UserError(Exception):
    """A user cannot be added, changed or removed; the text says why and what to do."""


class UnknownUserError(UserError):
    """There is no user of that name."""


class _LoginAttempt(NamedTuple):
    """A SCRAM exchange, and whether its user exists."""

    exchanges: Sequence[ScramExchange]
    """The same one with each password that would be right."""
    user: str
    is_known: bool


class PlainLogin(NamedTuple):
    """A decoded message of PLAIN."""

    user: str
    password: str


class PasswordCheck(NamedTuple):
    """A password that must be derived to check it."""

    user: str
    password: str
    keys: ScramKeys
    is_known: bool
    """Whether the keys are those of a user. Decoy keys take as long and match no password."""
    memory: bytes
    """What is remembered if it is right; equal for equal users and passwords."""

    def matches(self) -> bool:
        """Derive the password and compare. It takes 5 ms of processor time; call it in a thread."""
        return password_matches(_PLAIN_KEYS, self.password, self.keys)


class Users:
    """The users of one server. Methods that change users may be called from any thread and take
    tens of milliseconds. Methods for logins are called on the loop.
    """

    def __init__(
        self,
        path: Path,
        *,
        has_guest: bool = True,
        iterations: int = ITERATIONS,
    ) -> None:
        """Read the file. If there is none, only the guest exists.

        Raises:
            UsersFileError: the file exists and cannot be used.
        """
        self._path = path
        self._change = threading.Lock()
        self._process_key = token_bytes(32)
        self._verified: set[bytes] = set()
        self._stamps: tuple[object, object] | None = None
        self._has_guest = has_guest
        self._iterations = iterations
        self._is_sealed = True
        self._content = UsersContent({}, token_bytes(32))
        self.revision = 0
        self.problem = ""
        """Why the last change of the file was not loaded; "" if it was."""
        self._guest_keys = _guest_keys(token_bytes(SALT_BYTES)) if has_guest else {}
        self._share: Callable[[bytes, bytes], None] | None = None
        self._refusal = ""
        """Why users cannot be changed now; "" if they can."""
        self._cluster_keys: tuple[dict[str, ScramKeys], ...] = ()
        """Of CLUSTER_USER, for each of its secrets; all have the same salt."""
        self._load()

    # -- the table -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the users that were added, sorted, without the guest."""
        self.reload_if_changed()
        return sorted(self._content.users)

    def table(self) -> dict[str, Rights]:
        """Return the rights of the users that were added, by name."""
        self.reload_if_changed()
        return {name: user.rights for name, user in sorted(self._content.users.items())}

    def rights_of(self, name: str) -> Rights | None:
        """Return the rights of a user, None if there is no such user."""
        if name == GUEST:
            return FULL_RIGHTS if self._has_guest else None
        if name == CLUSTER_USER:
            return _CLUSTER_RIGHTS if self._cluster_keys else None
        record = self._content.users.get(name)
        return None if record is None else record.rights

    def login_mark(self, name: str, *, peer_is_loopback: bool = True) -> bytes:
        """Return what changes with the user's password; b"": this user cannot log in from there."""
        self.reload_if_changed()
        if name == GUEST:
            return b"guest" if self._is_guest(name, peer_is_loopback=peer_is_loopback) else b""
        record = self._content.users.get(name)
        return b"" if record is None else record.keys[_PLAIN_KEYS].stored_key

    def let_cluster_in(self, secrets: Sequence[str]) -> None:
        """Let the nodes of a cluster log in with SCRAM and one of these secrets, with nothing but
        the role replicate.
        """
        salt = token_bytes(SALT_BYTES)
        self._cluster_keys = tuple(_keys_of_secret(secret, salt) for secret in secrets)

    def share_changes(self, share: Callable[[bytes, bytes], None]) -> None:
        """Let the users be those of a cluster: call `share` with the file before and after each
        change, before it counts here. It raises UsersFileError if the change is not possible.
        """
        self._share = share
        self._refusal = ""

    def refuse_changes(self, why: str) -> None:
        """Refuse changes with UsersHeldError until `share_changes`; `why` "" accepts them again.

        A change under way may still happen: see `until_unchanging`.
        """
        self._refusal = why

    def until_unchanging(self) -> None:
        """Return when no change from before `refuse_changes` is under way. Call it in a thread."""
        with self._change:
            pass

    def seal_file(self) -> None:
        """Give a file that an earlier version has written its checksum and its twin. Call it when
        this process has the folder. Raises UsersFileError.
        """
        with self._change:
            self._load()
            if not self._is_sealed:
                self._keep(self._content, self.text)

    @property
    def text(self) -> bytes:
        """The users as the file has them."""
        return file_text(self._content)

    def adopt(self, text: bytes) -> None:
        """Replace all users by those of the cluster. Durable when it returns. Raises
        UsersFileError.
        """
        content = parse_file(self._path, text)
        with self._change:
            if text != file_text(self._content):
                self._keep(content, text)

    def add(self, name: str, password: str, rights: Rights | None = None) -> None:
        """Add a user, or give one a new password. Durable when it returns.

        Without `rights`, a new user may only read, and an existing user keeps its own.

        Raises:
            UserError: the name or the password is not allowed.
            UsersFileError: the file cannot be written.
        """
        _check_name(name)
        keys = self._keys_for(password)
        with self._change:
            self._load()
            known = self._content.users.get(name)
            if known is None and len(self._content.users) >= USERS_MAX:
                raise UserError(f"the limit, {USERS_MAX} users, is reached")
            if rights is None:
                rights = LEAST_RIGHTS if known is None else known.rights
            self._write({**self._content.users, name: UserRecord(keys, rights)})

    def set_password(self, name: str, password: str) -> None:
        """Give a user a new password. Open connections stay logged in.

        Raises:
            UnknownUserError: there is no such user.
            UserError, UsersFileError: as for `add`.
        """
        keys = self._keys_for(password)
        with self._change:
            self._load()
            record = self._record(name)
            self._write({**self._content.users, name: record._replace(keys=keys)})

    def grant(self, name: str, role: Role, scope: Scope = EVERYTHING) -> Rights:
        """Give a user a role, for everything or for a scope; return its rights now.

        Raises:
            UserError: there is no such user, or the role is not granted that way.
            UsersFileError: the file cannot be written.
        """
        return self._change_rights(name, lambda rights: rights.granted(role, scope))

    def revoke(
        self, name: str, role: Role, scope: Scope | None = None, *, force: bool = False
    ) -> Rights:
        """Take a role, or one scope of it, from a user; return its rights now. As `grant`.

        `force`: as for `remove`.
        """
        return self._change_rights(name, lambda rights: rights.revoked(role, scope), force=force)

    def remove(self, name: str, *, force: bool = False) -> bool:
        """Remove a user; return whether there was one.

        `force` removes the last user with the role admin, if the guest may log in.

        Raises:
            UserError: the guest, or the last admin, cannot be removed.
            UsersFileError: the file cannot be written.
        """
        if name == GUEST:
            raise UserError(
                "guest is built in (it works from this machine only); dcpd --guest off"
                " switches it off"
            )
        with self._change:
            self._load()
            if name not in self._content.users:
                return False
            left = {other: u for other, u in self._content.users.items() if other != name}
            self._check_admin(left, force=force)
            self._write(left)
        return True

    def _change_rights(
        self, name: str, change: Callable[[Rights], Rights], *, force: bool = False
    ) -> Rights:
        with self._change:
            self._load()
            record = self._record(name)
            try:
                rights = change(record.rights)
            except ValueError as error:
                raise UserError(f"user {name!r}: {error}") from error
            users = {**self._content.users, name: record._replace(rights=rights)}
            self._check_admin(users, force=force)
            self._write(users)
        return rights

    def _record(self, name: str) -> UserRecord:
        if name == GUEST:
            raise UserError("guest is built in: its password and roles cannot be changed")
        record = self._content.users.get(name)
        if record is None:
            raise UnknownUserError(f"there is no user {name!r}")
        return record

    def _check_admin(self, users: dict[str, UserRecord], *, force: bool) -> None:
        """Keep the last admin. Without a guest nobody could give the role back, not even after a
        restart, so `force` does not help then.
        """
        had_admin = any(u.rights.has(Role.ADMIN) for u in self._content.users.values())
        has_admin = any(u.rights.has(Role.ADMIN) for u in users.values())
        if not had_admin or has_admin or (force and self._has_guest):
            return
        if self._has_guest:
            raise UserError(
                "this is the last user with the role admin: only guest, from this machine, could "
                "manage the server. Give the role to another user first, or use --force"
            )
        raise UserError(
            "this is the last user with the role admin, and guest is switched off; "
            "give the role to another user first"
        )

    def _keys_for(self, password: str) -> dict[str, ScramKeys]:
        _check_password(password)
        return {
            mechanism: keys_of_password(
                mechanism,
                password,
                salt=token_bytes(SALT_BYTES),
                iterations=self._iterations,
            )
            for mechanism in HASH_NAMES
        }

    def check_of(self, name: str, password: str, *, peer_is_loopback: bool) -> PasswordCheck | bool:
        """Return whether a user may log in with a password, or the check that decides it.

        An answer without a derivation must not show who exists. It is given for the guest, whose
        password is public, for texts too long for a password, and for passwords that were right
        before.
        """
        self.reload_if_changed()
        if len(password) > PASSWORD_CHARS_MAX:
            return False
        if self._is_guest(name, peer_is_loopback=peer_is_loopback):
            return hmac.compare_digest(password.encode(), GUEST_PASSWORD.encode())
        [keys, *_], is_known = self._keys_of(name, _PLAIN_KEYS, peer_is_loopback=peer_is_loopback)
        # The stored key is part of the digest, so a new password invalidates the old entry.
        memory = hmac.digest(
            self._process_key,
            b"\0".join((name.encode(), password.encode(), keys.stored_key)),
            "sha256",
        )
        if memory in self._verified:
            return True
        return PasswordCheck(name, password, keys, is_known, memory)

    def conclude(self, check: PasswordCheck, *, matches: bool) -> bool:
        """Return whether a finished check lets its user in, and remember it if so."""
        record = self._content.users.get(check.user)
        if not (matches and check.is_known and record and record.keys[_PLAIN_KEYS] == check.keys):
            return False  # removed, or given another password meanwhile
        if len(self._verified) >= VERIFIED_MAX:
            self._verified.clear()
        self._verified.add(check.memory)
        return True

    def plain_step(self, name: str, *, is_right: bool) -> AuthStep:
        """Return the outcome of a login with a password."""
        rights = self.rights_of(name)
        if not is_right or rights is None:
            return AuthStep(Status.AUTH_ERROR, claimed=name)
        return AuthStep(Status.OK, user=name, rights=rights, claimed=name)

    # -- SCRAM -----------------------------------------------------------------------------------

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:  # noqa: ARG002 - the same for all
        """Return the mechanisms on offer. SDKs insist on SCRAM-SHA512, simple clients on PLAIN."""
        return [*HASH_NAMES, PLAIN]

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
        """Begin an exchange. It costs only an HMAC, because the keys are stored."""
        if mechanism not in HASH_NAMES:
            return AuthStep(Status.AUTH_ERROR)
        self.reload_if_changed()
        try:
            first = read_client_first(initial)
        except MalformedMessageError:
            return AuthStep(Status.EINVAL)
        keys, is_known = self._keys_of(first.user, mechanism, peer_is_loopback=peer_is_loopback)
        nonce = b64encode(token_bytes(18)).decode()
        exchanges = [begin_exchange(mechanism, first, each, nonce) for each in keys]
        attempt = _LoginAttempt(exchanges, first.user, is_known)
        server_first = exchanges[0].server_first.encode()  # the same in all of them
        return AuthStep(Status.AUTH_CONTINUE, server_first, attempt, claimed=first.user)

    def step(self, exchange: object, message: bytes) -> AuthStep:
        """Finish an exchange."""
        assert isinstance(exchange, _LoginAttempt), "an exchange that start() did not make"
        try:
            answers = [finish_exchange(each, message) for each in exchange.exchanges]
        except MalformedMessageError:
            return AuthStep(Status.EINVAL)
        user = CLUSTER_USER if is_node_user(exchange.user) else exchange.user
        rights = self.rights_of(user)
        answer = next(filter(None, answers), None)
        if answer is None or not exchange.is_known or rights is None:
            return AuthStep(Status.AUTH_ERROR, claimed=exchange.user)
        return AuthStep(Status.OK, answer, user=user, rights=rights, claimed=exchange.user)

    # -- keys ------------------------------------------------------------------------------------

    def _keys_of(
        self, name: str, mechanism: str, *, peer_is_loopback: bool
    ) -> tuple[Sequence[ScramKeys], bool]:
        """Return keys for any name, and whether they are those of a user. Keys that are more than
        one have the same salt and iterations.
        """
        # Decoy keys are made for every name, so the time does not show whether the user exists.
        size = hashlib.new(HASH_NAMES[mechanism]).digest_size
        seed = hmac.digest(self._content.decoy_key, f"{mechanism} {name}".encode(), "sha256")
        # No password has a stored key of zeros, and `is_known` is False besides.
        decoy = ScramKeys(seed[:SALT_BYTES], self._iterations, bytes(size), bytes(size))
        if self._is_guest(name, peer_is_loopback=peer_is_loopback):
            return [self._guest_keys[mechanism]], True
        if self._cluster_keys and is_node_user(name):
            return [each[mechanism] for each in self._cluster_keys], True
        known = self._content.users.get(name)
        return ([decoy], False) if known is None else ([known.keys[mechanism]], True)

    def _is_guest(self, name: str, *, peer_is_loopback: bool) -> bool:
        return name == GUEST and peer_is_loopback and self._has_guest

    # -- the file --------------------------------------------------------------------------------

    def reload_if_changed(self) -> None:
        """Reload the file if another process or an editor has changed it."""
        if stamps_of(self._path) == self._stamps:
            return
        try:
            self._load()
            self.problem = ""
        except UsersFileError as error:
            self.problem = str(error)
            _LOG.warning("users file not reloaded", extra={"fields": {"reason": str(error)}})

    def _load(self) -> None:
        # The stamps are taken first: a change in between is seen the next time.
        self._stamps = stamps_of(self._path)
        try:
            text, is_sealed = read_kept(self._path)
        except FileNotFoundError:
            self._take_over(UsersContent({}, self._content.decoy_key))
            return
        except FileDamagedError as error:
            raise UsersFileError(f"{self._path}: is damaged: {error}; {RESTORE_USERS}") from error
        except OSError as error:
            raise UsersFileError(f"{self._path}: cannot be read: {error.strerror}") from error
        content = parse_file(self._path, text)
        if not is_sealed:
            check_newest(self._path, text)
        self._is_sealed = is_sealed
        self._take_over(content)

    def _write(self, users: dict[str, UserRecord]) -> None:
        content = UsersContent(users, self._content.decoy_key)
        text = file_text(content)
        if self._refusal:
            raise UsersHeldError(self._refusal)
        if self._share is not None:
            self._share(file_text(self._content), text)
        self._keep(content, text)

    def _keep(self, content: UsersContent, text: bytes) -> None:
        try:
            write_users(self._path, text)
        except OSError as error:
            raise UsersFileError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._stamps = stamps_of(self._path)
        self._is_sealed = True
        self._take_over(content)

    def _take_over(self, content: UsersContent) -> None:
        self._content = content
        self.revision += 1


def read_plain(message: bytes) -> PlainLogin | AuthStep:
    """Decode a message of PLAIN (RFC 4616); return a refusal if it is malformed."""
    parts = message.split(b"\0")
    if len(parts) != 3 or len(message) > MESSAGE_BYTES_MAX:
        return AuthStep(Status.EINVAL)
    try:
        authzid, name, password = (part.decode() for part in parts)
    except UnicodeDecodeError:
        return AuthStep(Status.AUTH_ERROR)
    if authzid not in {"", name}:
        return AuthStep(Status.AUTH_ERROR, claimed=name)
    return PlainLogin(name, password)


def node_user(node: str) -> str:
    """Return the name with which a node logs in at the others."""
    return f"{CLUSTER_USER}/{node}"


def is_node_user(name: str) -> bool:
    """Whether nodes of the cluster log in with this name."""
    return _NODE_USER.fullmatch(name) is not None


def _guest_keys(salt: bytes) -> dict[str, ScramKeys]:
    """Derive the guest's keys, at start-up: it takes 5 ms."""
    return _keys_of_secret(GUEST_PASSWORD, salt)


def _keys_of_secret(secret: str, salt: bytes) -> dict[str, ScramKeys]:
    """Derive the keys of what is public, or too random to be guessed: few rounds are enough."""
    return {
        mechanism: keys_of_password(mechanism, secret, salt=salt, iterations=GUEST_ITERATIONS)
        for mechanism in HASH_NAMES
    }


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


FIRST_ADMIN: Final = "admin"
PASSWORD_BYTES_MAX: Final = 4096
"""Of the file. The longest password is far shorter; the error about it comes from `Users`."""


class FirstAdminError(Exception):
    """The first user cannot be added; the text says why and what to do."""


def add_first_admin(users: Users, path: Path) -> bool:
    """Add the first user of a server if there is none; return whether it was added. For containers,
    which hand over secrets as files: the file is only read while there is no user.

    Raises FirstAdminError, UsersFileError.
    """
    if users.names():
        return False
    try:
        with path.open("rb") as file:
            text = file.read(PASSWORD_BYTES_MAX + 1)
        password = text.decode().rstrip("\r\n")
    except OSError as error:
        raise FirstAdminError(
            f"there is no user yet, and the password file {path} of the first one cannot be read: "
            f"{error.strerror or error} (setting admin_password_file)"
        ) from error
    except UnicodeDecodeError as error:
        raise FirstAdminError(f"the password file {path} is not UTF-8 text") from error
    try:
        users.add(FIRST_ADMIN, password, FULL_RIGHTS)
    except UserError as error:
        raise FirstAdminError(f"the password file {path} cannot be used: {error}") from error
    return True
