"""What a feed remembers of the messages that a replica has not acknowledged. Pure.

Who calls it: `failover.replication.replica_feed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from dcp.session.replication_port import ReplicationError
from failover.replication.fed_stream import FedStream, Followed
from failover.replication.messages import TOLD_GROUPS_MAX
from failover.replication.whole_groups import WholeGroup

RECORD_BYTES: Final = 256
"""What this node remembers of a message, and of each of its sections, until it is acknowledged."""


class SentWhole(NamedTuple):
    """A whole group on its way."""

    group: WholeGroup
    seqnos: Mapping[int, int]
    """What the replica got of it."""
    streams_revision: int
    """Of the link's streams when it was sent (`StreamChanges`)."""


class Sent(NamedTuple):
    """A message that is not acknowledged."""

    number: int
    cost: int
    sent_ns: int
    """When it was made, to a tick."""
    followed: tuple[tuple[FedStream, Followed], ...] = ()
    whole: SentWhole | None = None
    filling: int = 0
    """Bytes of a copy that is filled for the first time; 0: the message brings what is new."""


class AckDelays:
    """How long one replica's acknowledgements of changes take."""

    def __init__(self, sent: Sequence[Sent]) -> None:
        """`sent` are the messages that are not acknowledged, the oldest first."""
        self._sent = sent
        self._worst_ns: int | None = None
        self._worst_new_ns: int | None = None
        """The same of messages that bring what is new."""

    @property
    def has_news(self) -> bool:
        """Whether there is anything to judge the replica by."""
        return bool(self._sent) or self._worst_ns is not None

    def acknowledged(self, sent: Sent, now_ns: int) -> None:
        """A message is acknowledged."""
        took_ns = now_ns - sent.sent_ns
        self._worst_ns = max(self._worst_ns or 0, took_ns)
        if not sent.filling:
            self._worst_new_ns = max(self._worst_new_ns or 0, took_ns)

    def oldest_new(self) -> Sent | None:
        """Return the oldest message with what is new that is on its way; None: there is none."""
        return next((sent for sent in self._sent if not sent.filling), None)

    def take_new(self, now_ns: int) -> int | None:
        """Return how long messages with what is new took at most since the last call, those that
        are still on their way included; None: there was none.
        """
        worst_ns, self._worst_new_ns = self._worst_new_ns, None
        oldest = self.oldest_new()
        if oldest is not None:
            worst_ns = max(worst_ns or 0, now_ns - oldest.sent_ns)
        return worst_ns

    def take(self, now_ns: int) -> tuple[int | None, int]:
        """Return how long it took at most since the last call (None: nothing was acknowledged), and
        how long the oldest message waits now.
        """
        worst_ns, self._worst_ns = self._worst_ns, None
        return worst_ns, now_ns - self._sent[0].sent_ns if self._sent else 0


class Questions:
    """What a master asks a replica: is it still the master?"""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, int]] = deque()
        """Questions that are not confirmed: question, when it was asked."""
        self.confirmations = 0
        self.confirmed_ns = 0
        """When the question was asked that was confirmed last; 0: none was."""

    def __len__(self) -> int:
        """How many are not confirmed."""
        return len(self._asked)

    def ask(self, question: int, now_ns: int) -> None:
        """A question leaves."""
        self._asked.append((question, now_ns))

    def confirmed(self, question: int) -> None:
        """The replica confirms a question, and all before it."""
        while self._asked and self._asked[0][0] <= question:
            self.confirmed_ns = self._asked.popleft()[1]
            self.confirmations += 1


def check_numbers(member: str, number: int, question: int, *, last: int) -> None:
    """Raise ReplicationError if a member cannot acknowledge these numbers. `last` is that of the
    last message that was made.
    """
    if number > last or question > last:
        raise ReplicationError(
            f"member {member} acknowledges message {number} and question {question}; "
            f"the last one sent is {last}"
        )
    if question < number:
        raise ReplicationError(
            f"member {member} has synced message {number} and confirms question {question}"
            " only: it confirms a message's question before it syncs the message"
        )


class CommitsTold:
    """Which whole groups are committed that a replica was not told of yet, by their messages."""

    def __init__(self) -> None:
        self._untold: dict[int, int] = {}
        """Commit group -> its message, for whole groups of which the replica does not know whether
        they are committed; the newest ones, in their order."""
        self._given_up = 0
        """The last message that `_untold` had and has not any more, because newer ones came."""
        self._committed: list[int] = []
        """Messages of whole groups that are committed, which the replica is not told yet."""

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._committed)

    def sent(self, group: int, number: int) -> None:
        """A message with a whole group leaves."""
        self._untold[group] = number
        if len(self._untold) > TOLD_GROUPS_MAX:
            self._given_up = self._untold.pop(next(iter(self._untold)))

    def can_tell(self, group: int) -> bool:
        """Whether a group can be told to be committed by its message."""
        return group in self._untold

    def committed(self, group: int) -> None:
        """All that the replica got of a group is committed."""
        self._committed.append(self._untold.pop(group))

    def take(self) -> tuple[int, int]:
        """Return the first committed messages that no other one separates: from, to. 0, 0: there
        are none.
        """
        if not self._committed:
            return 0, 0
        first, last = first_run(self._committed, self._untold.values(), self._given_up)
        self._committed = [number for number in self._committed if number > last]
        return first, last

    def clear(self) -> None:
        """The link is gone: nobody is told."""
        self._committed.clear()


def first_run(committed: Collection[int], others: Iterable[int], given_up: int) -> tuple[int, int]:
    """Return the first committed messages between which none of the others is: from, to. Up to
    `given_up` it is not known which others there were.
    """
    first, last = min(committed), max(committed)
    between = [number for number in others if first < number < last]
    if first < given_up:
        last = first
    elif between:
        last = max(number for number in committed if number < min(between))
    return first, last
