"""Which copies of a partition may become its master, and why, in words.

Who calls it: the admin API, for `dcpctl explain partition`. The rule itself is in
`failover.rules.election`: a clean election takes a member of the in-sync set.
"""

from __future__ import annotations

from typing import NamedTuple

from failover.rules.replication_record import ReplicationRecord


class Eligibility(NamedTuple):
    """Whether a copy may become master, or is it, and why."""

    may_become_master: bool
    why: str


def eligibility(record: ReplicationRecord, member: str, *, runs: bool) -> Eligibility:
    """Return it for one copy. `runs`: its process does."""
    assert member in record.copies, f"{member} holds no copy"
    if member in record.filling:
        return Eligibility(
            False,
            "it is being filled and has only a part; it joins the in-sync set when it is full",
        )
    if member not in record.isr:
        return Eligibility(
            False,
            "it is not in sync: it may lack answered changes. It joins again when it has caught up;"
            " only an unclean failover makes it master before, and loses what it lacks",
        )
    if not runs:
        return Eligibility(
            False, "its process does not run; it is in sync, so it may as soon as it runs again"
        )
    if member == record.master:
        return Eligibility(True, "it is the master")
    if member == record.wanted_master:
        return Eligibility(True, "it is in sync, and the partition is being handed over to it")
    return Eligibility(True, "it is in sync: it has every change that was committed")
