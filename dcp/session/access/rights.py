"""What a user may do: roles, each for everything or for some keys only. Pure.

The session asks it for users who may not do everything. The server's table of users stores it.

    read       GET and similar commands, statistics, seqnos and failover logs
    write      every change of documents; commands that answer with the value need read too
    stream     DCP
    admin      changes over the admin interface, and commands about partitions
    replicate  DCP as a replica's node (control x_replicate); for the nodes of a cluster only

System XATTRs (names that begin with `_`) are read with stream or admin, and changed with admin.

Changes that carry their own revision and CAS (SET_WITH_META and similar ones) need write and admin,
because they can make a document win against newer ones.

A role is granted for scopes: a key prefix, a collection, both, or everything (the empty scope).
`stream`, `admin` and `replicate` have no scopes. A user whose `read` is restricted cannot stream,
because a stream carries every key of a partition.

Invariants
- a command that is not in the table below needs the role admin, so a forgotten entry refuses it;
- a user without roles can log in and do nothing;
- `replicate` is granted by name only. What such a user acknowledges counts as a copy, so a user
  that is no node could make the cluster lose answered changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode

DEFAULT_COLLECTION: Final = "_default._default"


class Role(StrEnum):
    """See the module."""

    READ = "read"
    WRITE = "write"
    STREAM = "stream"
    ADMIN = "admin"
    REPLICATE = "replicate"


ROLES_WITHOUT_SCOPES: Final = frozenset({Role.STREAM, Role.ADMIN, Role.REPLICATE})


class Scope(NamedTuple):
    """The keys that a role is granted for."""

    prefix: bytes = b""
    """A prefix of the key; b"" is every key."""
    collection: str | None = None
    """scope.collection; None is every collection."""

    def __str__(self) -> str:
        """Return the scope in words."""
        if self == EVERYTHING:
            return "everything"
        keys = f"keys beginning with {self.prefix.decode(errors='backslashreplace')!r}"
        if self.collection is None:
            return keys
        return f"{keys if self.prefix else 'keys'} in collection {self.collection}"


EVERYTHING: Final = Scope()


class Denial(NamedTuple):
    """Why a command is refused."""

    role: Role
    """The role that is missing, or granted for other keys only."""
    why: str


class Rights:
    """The roles of one user. Immutable."""

    __slots__ = (
        "_scopes",
        "has_all_documents",
        "is_full",
        "may_read_system_xattrs",
        "may_write_system_xattrs",
    )

    def __init__(self, scopes_by_role: Mapping[Role, tuple[Scope, ...]]) -> None:
        self._scopes = dict(scopes_by_role)
        for role in ROLES_WITHOUT_SCOPES & self._scopes.keys():
            if any(scope != EVERYTHING for scope in self._scopes[role]):
                raise ValueError(f"the role {role} cannot be restricted to some keys")
        self.has_all_documents = self._is_unrestricted(Role.READ) and self._is_unrestricted(
            Role.WRITE
        )
        """Whether document commands need no check."""
        self.is_full = self.has_all_documents and {Role.STREAM, Role.ADMIN} <= self._scopes.keys()
        """Whether no command needs a check."""
        self.may_write_system_xattrs = Role.ADMIN in self._scopes
        """Beside the role for the document itself."""
        self.may_read_system_xattrs = self.may_write_system_xattrs or Role.STREAM in self._scopes
        """The same. Streams carry them, so who may stream may read them."""

    def __eq__(self, other: object) -> bool:
        """Return whether both allow the same."""
        return isinstance(other, Rights) and self._scopes == other._scopes

    def __hash__(self) -> int:
        """Return a hash that equal rights share."""
        return hash(frozenset(self._scopes.items()))

    def scopes(self) -> dict[Role, tuple[Scope, ...]]:
        """Return role -> its scopes, in the order of `Role`."""
        return {role: self._scopes[role] for role in Role if role in self._scopes}

    def has(self, role: Role) -> bool:
        """Return whether a role is held for any scope."""
        return role in self._scopes

    def granted(self, role: Role, scope: Scope = EVERYTHING) -> Rights:
        """Return these rights and one more.

        Raises ValueError if the role has no scopes, or is granted for everything already.
        """
        held = () if scope == EVERYTHING else self._scopes.get(role, ())
        if EVERYTHING in held:
            raise ValueError(f"{role} is granted for everything already; revoke that first")
        scopes = (*(other for other in held if other != scope), scope)
        return Rights({**self._scopes, role: scopes})

    def revoked(self, role: Role, scope: Scope | None = None) -> Rights:
        """Return these rights without a role, or without one of its scopes.

        Raises ValueError if it is not granted.
        """
        held = self._scopes.get(role, ())
        if not held or (scope is not None and scope not in held):
            raise ValueError(f"{role} is not granted for {scope}" if scope else f"no role {role}")
        left = () if scope is None else tuple(other for other in held if other != scope)
        others = {other: scopes for other, scopes in self._scopes.items() if other != role}
        return Rights({**others, role: left} if left else others)

    def denial(self, opcode: int, collection: str | None, key: bytes) -> Denial | None:
        """Return why a command on a key is refused; None: it is allowed."""
        need = NEEDS.get(opcode, _ADMIN_NEED)
        for alternatives in need.roles:
            denial = self._denial_of_role(need, alternatives, collection, key)
            if denial is not None:
                return denial
        if need is _STREAM_NEED and self.has(Role.READ) and not self._is_unrestricted(Role.READ):
            held = _listed(self._scopes[Role.READ])
            return Denial(
                Role.READ, f"a stream carries every key, and read is granted for {held} only"
            )
        return None

    def _denial_of_role(
        self, need: Need, alternatives: tuple[Role, ...], collection: str | None, key: bytes
    ) -> Denial | None:
        held = [role for role in alternatives if role in self._scopes]
        if not held:
            return Denial(alternatives[0], f"it takes the role {' or '.join(alternatives)}")
        if not need.concerns_keys:
            return None
        role = held[0]
        for scope in self._scopes[role]:
            if need.concerns_all_keys:
                if scope == EVERYTHING:
                    return None
            elif key.startswith(scope.prefix) and scope.collection in {None, collection}:
                return None
        what = "it concerns every key, and " if need.concerns_all_keys else ""
        return Denial(role, f"{what}{role} is granted for {_listed(self._scopes[role])} only")

    def _is_unrestricted(self, role: Role) -> bool:
        return EVERYTHING in self._scopes.get(role, ())


class Need(NamedTuple):
    """What a command needs."""

    roles: tuple[tuple[Role, ...], ...]
    """It needs one role of each tuple."""
    concerns_keys: bool = False
    """The roles must be held for the command's key."""
    concerns_all_keys: bool = False
    """The roles must be held for everything."""


def _listed(scopes: tuple[Scope, ...]) -> str:
    return " or ".join(map(str, scopes[:3])) + (" or others" if len(scopes) > 3 else "")


_NO_NEED: Final = Need(())
_READ_NEED: Final = Need(((Role.READ,),), concerns_keys=True)
_WRITE_NEED: Final = Need(((Role.WRITE,),), concerns_keys=True)
_BOTH_NEED: Final = Need(((Role.READ,), (Role.WRITE,)), concerns_keys=True)
_META_WRITE_NEED: Final = Need(((Role.WRITE,), (Role.ADMIN,)), concerns_keys=True)
_PUT_FRAMES_NEED: Final = Need(
    ((Role.WRITE,), (Role.ADMIN,)), concerns_keys=True, concerns_all_keys=True
)
_FLUSH_NEED: Final = Need(((Role.WRITE,),), concerns_keys=True, concerns_all_keys=True)
_HISTORY_NEED: Final = Need(((Role.READ, Role.STREAM),))
_STREAM_NEED: Final = Need(((Role.STREAM, Role.REPLICATE),))
_ADMIN_NEED: Final = Need(((Role.ADMIN,),))

MESSAGES_TO_CONSUMERS: Final = (
    Opcode.DCP_ADD_STREAM, Opcode.DCP_STREAM_END, Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_MUTATION,
    Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_SET_VBUCKET_STATE,
    Opcode.DCP_SYSTEM_EVENT, Opcode.DCP_PREPARE, Opcode.DCP_COMMIT, Opcode.DCP_ABORT,
    Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_OSO_SNAPSHOT, Opcode.DCP_NOOP,
)  # fmt: skip
"""What this server refuses from others, because it is a producer."""

NEEDS: Final[dict[int, Need]] = {
    **dict.fromkeys(
        (
            Opcode.HELLO, Opcode.SASL_LIST_MECHS, Opcode.SASL_AUTH, Opcode.SASL_STEP,
            Opcode.SELECT_BUCKET, Opcode.GET_CLUSTER_CONFIG, Opcode.GET_ERROR_MAP, Opcode.NOOP,
            Opcode.VERSION, Opcode.VERBOSITY, Opcode.QUIT, Opcode.QUITQ,
            Opcode.GET_COLLECTIONS_MANIFEST, Opcode.GET_COLLECTION_ID, Opcode.GET_SCOPE_ID,
        ),
        _NO_NEED,
    ),
    **dict.fromkeys(
        (
            Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_META,
            Opcode.GET_REPLICA, Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT,
            Opcode.SUBDOC_MULTI_LOOKUP,
        ),
        _READ_NEED,
    ),
    **dict.fromkeys(
        (
            Opcode.STAT, Opcode.RANGE_SCAN_CREATE, Opcode.RANGE_SCAN_CONTINUE,
            Opcode.RANGE_SCAN_CANCEL,
        ),
        Need(((Role.READ,),)),
    ),
    **dict.fromkeys(
        (
            Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.ADDQ, Opcode.REPLACE, Opcode.REPLACEQ,
            Opcode.DELETE, Opcode.DELETEQ, Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND,
            Opcode.PREPENDQ, Opcode.TOUCH, Opcode.UNLOCK, Opcode.X_BATCH,
        ),
        _WRITE_NEED,
    ),
    **dict.fromkeys(
        (
            Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ, Opcode.GAT,
            Opcode.GATQ, Opcode.GET_AND_LOCK, Opcode.SUBDOC_DICT_ADD, Opcode.SUBDOC_DICT_UPSERT,
            Opcode.SUBDOC_DELETE, Opcode.SUBDOC_REPLACE, Opcode.SUBDOC_ARRAY_PUSH_LAST,
            Opcode.SUBDOC_ARRAY_PUSH_FIRST, Opcode.SUBDOC_ARRAY_INSERT,
            Opcode.SUBDOC_ARRAY_ADD_UNIQUE, Opcode.SUBDOC_COUNTER, Opcode.SUBDOC_MULTI_MUTATION,
            Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
        ),
        _BOTH_NEED,
    ),
    **dict.fromkeys(
        (
            Opcode.SET_WITH_META, Opcode.SETQ_WITH_META, Opcode.DEL_WITH_META,
            Opcode.DELQ_WITH_META,
        ),
        _META_WRITE_NEED,
    ),
    Opcode.GET_RANDOM_KEY: Need(((Role.READ,),), concerns_keys=True, concerns_all_keys=True),
    Opcode.X_PUT_FRAMES: _PUT_FRAMES_NEED,
    **dict.fromkeys((Opcode.FLUSH, Opcode.FLUSHQ), _FLUSH_NEED),
    **dict.fromkeys(
        (
            Opcode.GET_ALL_VB_SEQNOS, Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG,
            Opcode.OBSERVE_SEQNO, Opcode.SEQNO_PERSISTENCE,
        ),
        _HISTORY_NEED,
    ),
    **dict.fromkeys(
        (
            Opcode.DCP_OPEN, Opcode.DCP_CONTROL, Opcode.DCP_STREAM_REQ, Opcode.DCP_CLOSE_STREAM,
            Opcode.DCP_BUFFER_ACK, Opcode.X_GROUP_BEAT, Opcode.X_READ_HASHES,
            *MESSAGES_TO_CONSUMERS,
        ),
        _STREAM_NEED,
    ),
    **dict.fromkeys(
        (Opcode.X_REPLICA_ACK, Opcode.X_READ_VERSIONS, Opcode.X_CUT),
        Need(((Role.REPLICATE,),)),
    ),
    **dict.fromkeys(
        (
            Opcode.SET_COLLECTIONS_MANIFEST, Opcode.COMPACT_DB, Opcode.STOP_PERSISTENCE,
            Opcode.START_PERSISTENCE,
        ),
        _ADMIN_NEED,
    ),
}  # fmt: skip
"""What each command needs. Every other command needs the role admin."""

FULL_RIGHTS: Final = Rights({role: (EVERYTHING,) for role in Role if role != Role.REPLICATE})
"""Rights of the guest, of clients without a login, of users that were added without roles, and of
users older than roles."""


def split_key(wire_key: bytes, *, has_collections: bool) -> tuple[str | None, bytes]:
    """Split a key of the wire into its collection (None: not the default one) and the key itself.

    With collections, a key begins with its collection's id as unsigned LEB128.
    """
    if not has_collections:
        return DEFAULT_COLLECTION, wire_key
    id_bytes = 1
    while id_bytes < len(wire_key) and wire_key[id_bytes - 1] & 0x80:
        id_bytes += 1
    is_default = wire_key[:1] == b"\0"
    return DEFAULT_COLLECTION if is_default else None, wire_key[id_bytes:]
