"""Static groups: member i of n follows every n-th partition. There is no coordinator.

    Consumer(server, group=Group(2, 5))
    Consumer(server, group=Group.from_environment())

The members cover each partition exactly once if all use the same `size`. To change the size, stop
all members, then start them with the new size. Checkpoints are stored by partition: if all members
share a store (in the server, or your own), the new owner of a partition continues where the old one
stopped. A checkpoint file or LMDB file belongs to one member.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

SIZE_VARIABLE: Final = "DCPD_GROUP_SIZE"
MEMBER_VARIABLES: Final = ("DCPD_GROUP_MEMBER", "JOB_COMPLETION_INDEX")
"""Variables with the member's number. Kubernetes sets the second one for indexed jobs."""
NAME_VARIABLE: Final = "DCPD_GROUP_NAME"
"""The name of the StatefulSet: its pods are NAME-0, NAME-1, ..."""
POD_VARIABLE: Final = "POD_NAME"
"""A pod's name. Nothing sets it but the pod's description, so whoever sets it wants its ordinal."""
HOST_VARIABLE: Final = "HOSTNAME"
"""A pod's name, too, but any host has one: `ip-10-0-0-1` is no member 1. Used with NAME_VARIABLE
only."""
_ORDINAL: Final = re.compile(r"(.+)-(0|[1-9]\d*)")


class Group(NamedTuple):
    """Member `member` (from 0) of a group of `size` consumers that share the partitions.

    All members must use the same size. There is no coordinator.
    """

    member: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Group:
        """Return the group and member that the environment names for this process.

        The size is DCPD_GROUP_SIZE; the member is DCPD_GROUP_MEMBER or JOB_COMPLETION_INDEX, or
        the ordinal at the end of POD_NAME ("indexer-3"). With DCPD_GROUP_NAME ("indexer") HOSTNAME
        counts, too, and the name before the ordinal must be that. Raises ValueError, which says
        what is missing.
        """
        known = os.environ if environment is None else environment
        size = _number(known, SIZE_VARIABLE)
        if size is None:
            raise ValueError(f"{SIZE_VARIABLE} is not set: set it to the number of members")
        for name in MEMBER_VARIABLES:
            member = _number(known, name)
            if member is not None:
                return cls(member, size).checked()
        wanted = known.get(NAME_VARIABLE, "")
        for name in (POD_VARIABLE, HOST_VARIABLE) if wanted else (POD_VARIABLE,):
            found = _ORDINAL.fullmatch(known.get(name, ""))
            if found is not None and wanted in {"", found[1]}:
                return cls(int(found[2]), size).checked()
        raise ValueError(
            f"the member's number is missing: set {MEMBER_VARIABLES[0]}, or in a StatefulSet"
            f" {NAME_VARIABLE} to its name, so that {POD_VARIABLE} or {HOST_VARIABLE} is"
            f" {wanted or 'NAME'}-0, {wanted or 'NAME'}-1, ...; {_shown(known)}"
        )

    def checked(self) -> Group:
        """Return the group. Raises ValueError if it has no such member."""
        if not 0 <= self.member < self.size:
            raise ValueError(
                f"there is no member {self.member} in a group of {self.size}: use 0 to"
                f" {self.size - 1}"
            )
        return self

    def vbuckets(self, count: int) -> range:
        """Return the partitions of this member, of `count` in all."""
        return range(self.member, count, self.size)


def _shown(environment: Mapping[str, str]) -> str:
    shown = (f"{name} is {environment.get(name, '')!r}" for name in (POD_VARIABLE, HOST_VARIABLE))
    return ", ".join(shown)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a number")
    return int(text)
