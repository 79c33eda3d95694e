"""A brute-force model of partition histories: what is true, whatever a rollback rule says.

Nodes and clients keep their *full* histories, every write with a number of its own, so that what
they share is found by comparing writes and what a client would end with by streaming to it. The
rule under test sees only what travels in practice: a position, a version list, a failover log.

A world has a few nodes. Any of them may act as master (also a deposed one that does not know it
yet), so histories form a tree. Clients are fed de-duplicated snapshots, cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from failover.rules.history import FAILOVER_ENTRIES_MAX, FailoverLog
from failover.rules.rollback import Decision, Question, decide

KEYS = 3  # few, so that writes supersede one another often


class Write(NamedTuple):
    number: int  # unique in a world
    key: int
    is_delete: bool


History = tuple[Write, ...]  # seqno n is at index n - 1
Label = Callable[[Write], tuple[int, bool]]  # which key a write goes to and whether it deletes


def real(write: Write) -> tuple[int, bool]:
    return write.key, write.is_delete


def state(history: History, label: Label = real) -> dict[int, int]:
    """The map a history leaves."""
    result: dict[int, int] = {}
    for write in history:
        apply(result, write, label)
    return result


def apply(state_map: dict[int, int], write: Write, label: Label = real) -> None:
    key, is_delete = label(write)
    if is_delete:
        state_map.pop(key, None)
    else:
        state_map[key] = write.number


def snapshot(
    history: History, above: int, end: int, purge: int, label: Label = real
) -> list[tuple[int, Write]]:
    """What a de-duplicated snapshot of the seqnos above `above` up to `end` carries."""
    newest = {label(history[n - 1])[0]: n for n in range(above + 1, end + 1)}
    numbered = ((n, history[n - 1]) for n in sorted(newest.values()))
    return [(n, write) for n, write in numbered if n > purge or not label(write)[1]]


def shared_length(one: History, other: History) -> int:
    """How many first writes two histories have in common, found write by write."""
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


@dataclass
class Node:
    """A server: its whole history, and the failover log that the code under test keeps."""

    log: FailoverLog
    lineage: list[tuple[int, int]]  # every version it went through, newest first, never cut
    history: History = ()
    complete: int = 0  # end of the last snapshot that is whole
    snap_end: int = 0  # end of the snapshot it is in
    purge: int = 0
    acting: bool = False
    entries_max: int = FAILOVER_ENTRIES_MAX

    def cut(self, seqno: int) -> None:
        self.history = self.history[:seqno]
        self.complete = min(self.complete, seqno)
        self.snap_end = len(self.history)
        if seqno < self.purge:
            assert not seqno, "a node cannot restore a state below its purge seqno, but start again"
            self.purge = 0

    def begin_version(self, vb_uuid: int) -> None:
        seqno = len(self.history)
        self.log = self.log.branch(vb_uuid, seqno, entries_max=self.entries_max)
        self.lineage = [(vb_uuid, seqno), *(v for v in self.lineage if v[1] <= seqno)]
        assert self.log.pairs() == self.lineage[: len(self.log.entries)]

    def decide(self, question: Question) -> Decision:
        return decide(question, self.log, len(self.history), self.purge)


class Position(NamedTuple):
    """A state a client can go back to: the end of a snapshot it has had in full."""

    seqno: int
    content: dict[int, int]
    purge: int


@dataclass
class Client:
    """A consumer that keeps its state at each snapshot's end, and takes over the server's log."""

    path: History = ()  # the history it follows, up to its snapshot's end
    content: dict[int, int] = field(default_factory=dict)
    seqno: int = 0
    snap_start: int = 0  # it has had everything up to here
    snap_end: int = 0
    purge: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    kept: list[Position] = field(default_factory=lambda: [Position(0, {}, 0)])

    def question(self, *, with_list: bool) -> Question:
        vb_uuid = self.versions[0][0] if self.versions else 0
        return Question(
            self.seqno, vb_uuid, self.snap_start, self.snap_end,
            versions=tuple(self.versions) if with_list else (), client_purge_seqno=self.purge,
        )  # fmt: skip

    def restore(self, seqno: int) -> None:
        """Go back to the newest state held at or below `seqno`."""
        self.kept = [position for position in self.kept if position.seqno <= seqno]
        last = self.kept[-1]
        self.seqno = self.snap_start = self.snap_end = last.seqno
        self.content, self.purge = dict(last.content), last.purge
        self.path = self.path[: last.seqno]
        self.versions = [v for v in self.versions if v[1] <= last.seqno] if last.seqno else []

    def accepted(self, node: Node) -> None:
        self.versions = node.log.pairs()  # at once: newer than the data

    def receive(self, node: Node, end: int, cut_at: int) -> None:
        """Take one de-duplicated snapshot up to `end`, of which only what is <= `cut_at` comes."""
        above = self.seqno
        if self.seqno < self.snap_end and self.seqno > self.snap_start:
            # Resumed inside a snapshot: it is the old one that goes on, to the end it had at least.
            end = max(end, self.snap_end)
        else:
            self.snap_start = self.seqno
        if end <= above:
            return
        self.path, self.snap_end, self.purge = node.history[:end], end, node.purge
        for seqno, write in snapshot(node.history, above, end, node.purge):
            if seqno > cut_at:
                return
            apply(self.content, write)
            self.seqno = seqno
        if cut_at >= end:
            self.seqno = end  # the window stays, as most clients report it
            self.kept.append(Position(end, dict(self.content), self.purge))

    def copy(self) -> Client:
        return Client(
            self.path, dict(self.content), self.seqno, self.snap_start, self.snap_end, self.purge,
            list(self.versions), list(self.kept),
        )  # fmt: skip


# ------------------------------------------------------------------- what is true of a decision


def ends_right(client: Client, node: Node, seqno: int, label: Label) -> bool:
    """Whether a client set back to `seqno` ends with the node's map, were the data `label`'s.

    At or below its snapshot's start (anywhere, if it has the whole snapshot) the client is taken
    to restore exactly; at its own position inside a snapshot it has what it was sent.
    """
    start, end = effective_window(client)
    if seqno <= start:
        held = state(client.path[:seqno], label)
    else:
        assert seqno == client.seqno
        held = state(client.path[:start], label)
        for n, write in snapshot(client.path, start, end, 0, label):
            if n <= seqno:
                apply(held, write, label)
    high = len(node.history)
    if seqno > high:
        return False
    for _, write in snapshot(node.history, seqno, high, node.purge, label):
        apply(held, write, label)
    return held == state(node.history, label)


def effective_window(client: Client) -> tuple[int, int]:
    """Start and end of the snapshot the client is inside; its position twice if it is in none."""
    if client.seqno in {client.snap_start, client.snap_end}:
        return client.seqno, client.seqno
    return client.snap_start, client.snap_end


def adversaries(client: Client, node: Node, seqno: int) -> list[Label]:
    """Data that would show a wrong decision, for what neither side can know of the data.

    - every write to a key of its own: a write that is not the node's stays for ever
    - a write of the client's snapshot superseded at that snapshot's end: it was never sent
    - a key deleted at the purge seqno: nobody says so any more
    """

    def distinct(write: Write) -> tuple[int, bool]:
        return write.number, False

    def superseding(old: Write, new: Write, *, is_delete: bool) -> Label:
        def label(write: Write) -> tuple[int, bool]:
            if write == new:
                return old.number, is_delete
            return write.number, False

        return label

    labels: list[Label] = [distinct]
    start, end = effective_window(client)
    if start < seqno:
        last = client.path[end - 1]
        labels += [superseding(w, last, is_delete=False) for w in client.path[start:seqno]]
    if seqno < node.purge != client.purge:
        tombstone = node.history[node.purge - 1]
        held = [w for w in node.history[:seqno] if w in client.path[:start]]
        labels += [superseding(w, tombstone, is_delete=True) for w in held]
    return labels


def survives(client: Client, node: Node, seqno: int) -> bool:
    """Whether going on from `seqno` is right whatever the data."""
    return all(ends_right(client, node, seqno, x) for x in adversaries(client, node, seqno))


def best_seqno(client: Client, node: Node) -> int:
    """The highest seqno from which the client may go on whatever the data."""
    start, _ = effective_window(client)
    candidates = [client.seqno, *range(start, -1, -1)]
    return next(seqno for seqno in candidates if survives(client, node, seqno))


# ----------------------------------------------------------------------------- worlds and actions


@dataclass
class World:
    nodes: list[Node]
    clients: list[Client]
    uuids: int = 1
    writes: int = 0

    @classmethod
    def new(
        cls, nodes: int = 3, clients: int = 2, *, entries_max: int = FAILOVER_ENTRIES_MAX
    ) -> World:
        made = [
            Node(FailoverLog.create(1), [(1, 0)], entries_max=entries_max) for _ in range(nodes)
        ]
        made[0].acting = True
        return cls(made, [Client() for _ in range(clients)])

    def next_uuid(self) -> int:
        self.uuids += 1
        return self.uuids

    def masters(self) -> list[Node]:
        return [node for node in self.nodes if node.acting]

    def write(self, pick: int, count: int, keys: Sequence[int]) -> None:
        masters = self.masters()
        node = masters[pick % len(masters)]
        for index in range(count):
            chosen = keys[index % len(keys)]
            self.writes += 1
            node.history += (Write(self.writes, chosen % KEYS, chosen // KEYS % 3 == 0),)
        node.complete = node.snap_end = len(node.history)

    def replicate(self, pick: int, source_pick: int, upto: int, ahead: int) -> None:
        """A node follows a master: reconciles by the rule, then takes every version, cut anywhere.

        What it takes lies inside a snapshot that goes on for `ahead` seqnos more.
        """
        masters = self.masters()
        source = masters[source_pick % len(masters)]
        node = self.nodes[pick % len(self.nodes)]
        if node is source:
            return
        node.acting = False
        had = len(node.history)
        start = min(had, node.complete)
        answer = source.decide(
            Question(had, node.log.current.vb_uuid, start, max(had, node.snap_end),
                     versions=tuple(node.log.pairs()))
        )  # fmt: skip
        back_to = answer.rollback_seqno
        if back_to is not None:
            node.cut(back_to if back_to >= node.purge else 0)
        had = len(node.history)
        assert node.history == source.history[:had], answer.reason
        if had < source.purge:
            node.cut(0)
            node.purge = source.purge
        high = len(source.history)
        taken = min(high, max(len(node.history) + upto, source.purge, node.purge))
        node.history = source.history[:taken]
        node.snap_end = min(high, taken + ahead)
        if taken in {node.snap_end, node.purge}:
            node.complete = node.snap_end = taken
        node.log, node.lineage = source.log, list(source.lineage)  # may be newer than the data

    def promote(self, pick: int) -> None:
        """A node crashes or its master does; it comes up as master of what it has whole."""
        node = self.nodes[pick % len(self.nodes)]
        node.cut(node.complete)
        node.acting = True
        node.begin_version(self.next_uuid())

    def branch(self, pick: int, back: int) -> None:
        """An operator undoes the newest `back` writes."""
        masters = self.masters()
        node = masters[pick % len(masters)]
        node.cut(max(node.purge, len(node.history) - back))
        node.begin_version(self.next_uuid())

    def purge(self, pick: int, seqno: int) -> None:
        masters = self.masters()
        node = masters[pick % len(masters)]
        node.purge = max(node.purge, min(seqno, node.complete - 1))

    def feed(self, pick: int, source_pick: int, ends: Sequence[int], cut_at: int) -> None:
        """A client whose request was accepted takes snapshots until its connection is cut."""
        client, node = self.client_and_master(pick, source_pick)
        high = len(node.history)
        cut_seqno = client.seqno + cut_at
        for distance in ends:
            # A snapshot never ends inside a purged range: whoever had it whole and names our
            # purge seqno would keep keys whose deletion is gone.
            end = min(high, max(client.seqno + distance, node.purge))
            client.receive(node, end, cut_seqno)
            if client.seqno < end or client.seqno >= cut_seqno:
                break

    def client_and_master(self, pick: int, source_pick: int) -> tuple[Client, Node]:
        masters = self.masters()
        return self.clients[pick % len(self.clients)], masters[source_pick % len(masters)]


def follow_to_the_end(client: Client, node: Node, *, with_list: bool) -> list[Decision]:
    """Ask, obey, ask again until accepted; return every answer."""
    answers: list[Decision] = []
    while True:
        assert len(answers) <= 3, answers
        answers.append(node.decide(client.question(with_list=with_list)))
        back_to = answers[-1].rollback_seqno
        if back_to is None:
            client.accepted(node)
            return answers
        assert back_to < client.seqno, answers[-1].reason
        client.restore(back_to)
