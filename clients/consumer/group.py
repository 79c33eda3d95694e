"""Static groups: member i of n follows every n-th partition. There is no coordinator.

    Consumer(server, group=Group(2, 5))
    Consumer(server, group=Group.from_environment())

The members cover each partition exactly once as long as all agree on `size`. To change the size,
stop all members, then start them with the new size. Checkpoints are kept by partition: if all
members share a store (in the server, or one of your own), the new owner of a partition continues
where the old one stopped. A checkpoint file or LMDB file belongs to one member.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

SIZE_VARIABLE: Final = "DCPD_GROUP_SIZE"
MEMBER_VARIABLES: Final = ("DCPD_GROUP_MEMBER", "JOB_COMPLETION_INDEX")
"""Variables that hold the member's number itself; the second is Kubernetes' for indexed jobs."""
NAME_VARIABLES: Final = ("POD_NAME", "HOSTNAME")
"""Variables with a name that ends with the ordinal, as the pods of a StatefulSet have."""
_ORDINAL: Final = re.compile(r"-(\d+)$")


class Group(NamedTuple):
    """Member `member` (from 0) of `size`; see the module."""

    member: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Group:
        """Return the group and member that the environment names for this process.

        The size is DCPD_GROUP_SIZE; the member is DCPD_GROUP_MEMBER or JOB_COMPLETION_INDEX, or
        the ordinal at the end of POD_NAME or HOSTNAME ("indexer-3"). Raises ValueError that says
        what is missing.
        """
        known = os.environ if environment is None else environment
        size = _number(known, SIZE_VARIABLE)
        if size is None:
            raise ValueError(f"{SIZE_VARIABLE} is not set: how many members has the group?")
        for name in MEMBER_VARIABLES:
            member = _number(known, name)
            if member is not None:
                return cls(member, size).checked()
        for name in NAME_VARIABLES:
            found = _ORDINAL.search(known.get(name, ""))
            if found is not None:
                return cls(int(found[1]), size).checked()
        raise ValueError(
            f"which member is this? Set {MEMBER_VARIABLES[0]}, or let {' or '.join(NAME_VARIABLES)}"
            " end in an ordinal, as the pods of a StatefulSet do"
        )

    def checked(self) -> Group:
        """Return the group. Raises ValueError if it has no such member."""
        if not 0 <= self.member < self.size:
            raise ValueError(
                f"there is no member {self.member} in a group of {self.size}: 0 to {self.size - 1}"
            )
        return self

    def vbuckets(self, count: int) -> range:
        """Return the partitions of this member, of `count` in all."""
        return range(self.member, count, self.size)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it has to be a number")
    return int(text)
