"""What connections need of the replication of their node. A node alone has none of it."""

from __future__ import annotations

from typing import Protocol

from dcp.core.groups import Published
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.replication_port import ReplicationPort
from vbucket.log.commit_group import CommitGroup


class ReplicationHooks(Protocol):
    """See the module; `dcp.server.cluster.replicated_node` implements it."""

    acknowledges_as_master: bool
    """Whether a write is answered when this node's disk has it (setting acknowledge)."""

    @property
    def port(self) -> ReplicationPort:
        """Where the nodes of replicas come in."""

    def held(self) -> HeldAnswers:
        """Return what holds the answers of a new connection."""

    def before_commands(self, now_ns: int) -> None:
        """Fence what may not be answered any more; call it before each batch of requests."""

    def after_commands(self) -> None:
        """A batch of requests was handled."""

    def after_acknowledgement(self) -> None:
        """A replica's acknowledgement was handled. Answers that waited for it leave now."""

    def group_begun(self, group: CommitGroup) -> None:
        """A group is about to be written: the commit path calls this first."""

    def group_published(self, published: Published) -> None:
        """A job of the log is done: tell the parts of the server what that commits."""
