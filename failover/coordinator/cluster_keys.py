"""The keys of a cluster in the metadata store. Pure.

    <root>cluster                what holds for all of the cluster
    <root>manifest               scopes and collections
    <root>users                  users and their rights
    <root>plan                   the move of copies and masters that is under way
    <root>leader                 the coordinator          under its member's lease
    <root>alive/<member>         a running process        under its member's lease
    <root>address/<host:port>    the process reached there   the same
    <root>clock/<member>         its wall clock, at times  the same
    <root>links/<member>         nodes that run, and do not let it follow them   the same
    <root>member/<member>        a member of the cluster
    <root>name/<name>            the member that has a name
    <root>removed                written whenever a member is removed: the map's revision rises
    <root>partition/<vb>         one partition's record
    <root>suspect/<member>       a member's report        under its member's lease
    <root>command/<vb>           an operator's command for one partition

A member is a data folder: its id comes from the folder, so a node with an empty disk is another
member. <vb> has five digits, so keys sort by partition.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

MEMBER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a member id may look like: it is part of keys and log lines."""
_VB_DIGITS: Final = 5


class KeyKind(StrEnum):
    """The kinds of keys below the root."""

    CLUSTER = "cluster"
    MANIFEST = "manifest"
    USERS = "users"
    PLAN = "plan"
    LEADER = "leader"
    ALIVE = "alive"
    CLOCK = "clock"
    LINKS = "links"
    MEMBER = "member"
    REMOVED = "removed"
    PARTITION = "partition"
    SUSPECT = "suspect"
    COMMAND = "command"


_KINDS: Final = {str(kind): kind for kind in KeyKind}
_SINGLE: Final = frozenset(
    {
        KeyKind.CLUSTER,
        KeyKind.MANIFEST,
        KeyKind.USERS,
        KeyKind.PLAN,
        KeyKind.LEADER,
        KeyKind.REMOVED,
    }
)
_OF_PARTITIONS: Final = frozenset({KeyKind.PARTITION, KeyKind.COMMAND})


class ParsedKey(NamedTuple):
    """What a key names. Of member and partition only one is set, and none for the single keys."""

    kind: KeyKind
    member: str = ""
    vb_id: int = -1


class ClusterKeys:
    """The keys below one root, for example b"/dcpd/orders/"."""

    def __init__(self, root: bytes) -> None:
        if not root.endswith(b"/"):
            raise ValueError(f"cluster keys: the root {root!r} must end with a slash")
        self.root: Final = root
        self.leader: Final = root + b"leader"
        self.removed: Final = root + b"removed"
        self.cluster: Final = root + b"cluster"
        self.manifest: Final = root + b"manifest"
        self.users: Final = root + b"users"
        self.plan: Final = root + b"plan"

    def of_member(self, kind: KeyKind, member: str) -> bytes:
        """Return the key of this kind for a member."""
        if not MEMBER_ID.fullmatch(member):
            raise ValueError(
                f"member id {member!r}: 1 to 64 letters, digits, dots, dashes or underscores wanted"
            )
        return self.root + f"{kind}/{member}".encode()

    def of_members(self, kind: KeyKind) -> bytes:
        """Return the prefix of the keys of this kind for all members."""
        return self.root + f"{kind}/".encode()

    def of_name(self, name: str) -> bytes:
        """Return the key that says which member has a name. Views do not have it."""
        return self.root + b"name/" + name.encode()

    def of_address(self, address: str) -> bytes:
        """Return the key that says which process has an address. Views do not have it."""
        return self.root + b"address/" + address.encode()

    def of_partition(self, kind: KeyKind, vb_id: int) -> bytes:
        """Return the key of this kind for a partition."""
        assert kind in _OF_PARTITIONS
        return self.root + f"{kind}/{vb_id:0{_VB_DIGITS}}".encode()

    def of_partitions(self, kind: KeyKind) -> bytes:
        """Return the prefix of the keys of this kind for all partitions."""
        assert kind in _OF_PARTITIONS
        return self.root + f"{kind}/".encode()

    def parse(self, key: bytes) -> ParsedKey | None:
        """Return what a key names; None if this version knows no such key."""
        if not key.startswith(self.root):
            return None
        kind_name, _, name = key[len(self.root) :].decode("utf-8", "replace").partition("/")
        kind = _KINDS.get(kind_name)
        if kind is None:
            return None
        if kind in _SINGLE:
            return ParsedKey(kind) if key == self.root + kind.encode() else None
        if kind in _OF_PARTITIONS:
            is_number = len(name) == _VB_DIGITS and name.isascii() and name.isdigit()
            return ParsedKey(kind, vb_id=int(name)) if is_number else None
        return ParsedKey(kind, member=name) if MEMBER_ID.fullmatch(name) else None
