"""Consumers that die at any point between receiving, effects and saving, against a whole in-memory
node that goes on meanwhile: what they hold in the end is what the server has.

- who writes effects and positions in one transaction applies no change twice;
- who saves positions afterwards may apply some twice, and misses none;
- a mirror is the first of these, with its documents in dicts or in LMDB.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_consumer_pair import KEYS, ROUNDS_MAX, VB_IDS, ConsumerPair

from clients.consumer.core import Batch
from clients.consumer.streams import Wanted
from clients.event import Deletion, Event, Mutation, Rollback, StreamOpened
from clients.mirror.lmdb_mirror import LmdbStore
from clients.mirror.mirror_state import MemoryStore, take
from clients.position import Position
from dcp.wire.opcode import Opcode

POINTS = ["before effects", "between effects", "after effects", "after saving"]


class KilledError(Exception):
    """The consumer's process is gone."""


def until_killed(events: Iterable[Event], count: int | None) -> Iterable[Event]:
    """Yield events; die before number `count`, and not at all for None."""
    for number, event in enumerate(events):
        if number == count:
            raise KilledError
        yield event
    if count is not None:
        raise KilledError


class Journal:
    """What an application holds: documents, how to undo, and which changes it applied."""

    def __init__(self) -> None:
        self.documents: dict[int, dict[bytes, bytes]] = {vb_id: {} for vb_id in VB_IDS}
        self.entries: dict[int, list[tuple[int, bytes, bytes | None]]] = {vb: [] for vb in VB_IDS}

    def apply(self, event: Event) -> None:
        match event:
            case Mutation() | Deletion():
                documents = self.documents[event.vb_id]
                before = documents.get(event.key)
                self.entries[event.vb_id].append((event.seqno, event.key, before))
                if isinstance(event, Mutation):
                    documents[event.key] = event.value
                else:
                    documents.pop(event.key, None)
            case Rollback():
                self.undo(event.vb_id, event.to_seqno)

    def undo(self, vb_id: int, to_seqno: int) -> None:
        entries, documents = self.entries[vb_id], self.documents[vb_id]
        while entries and entries[-1][0] > to_seqno:
            _, key, before = entries.pop()
            if before is None:
                documents.pop(key, None)
            else:
                documents[key] = before


class InOneTransaction:
    """Effects and positions become durable together."""

    def __init__(self) -> None:
        self.durable = Journal()
        self.positions: dict[int, Position] = {}

    def take(self, batch: Batch, point: str | None, count: int) -> None:
        if point == "before effects":
            raise KilledError
        working = copy.deepcopy(self.durable)
        for event in until_killed(batch.events, count if point == "between effects" else None):
            working.apply(event)
        if point == "after effects":
            raise KilledError
        self.durable, self.positions = working, self.positions | batch.positions
        if point == "after saving":
            raise KilledError

    def documents(self, vb_id: int) -> dict[bytes, bytes]:
        seqnos = [seqno for seqno, _, _ in self.durable.entries[vb_id]]
        assert seqnos == sorted(set(seqnos)), "a change was applied twice"
        return self.durable.documents[vb_id]


class PositionsLater:
    """Every effect is durable at once, positions only at the end of a batch."""

    def __init__(self) -> None:
        self.durable = Journal()
        self.positions: dict[int, Position] = {}

    def take(self, batch: Batch, point: str | None, count: int) -> None:
        if point == "before effects":
            raise KilledError
        for event in until_killed(batch.events, count if point == "between effects" else None):
            if isinstance(event, StreamOpened):
                # What was done after the position was saved may belong to a history that is gone.
                self.durable.undo(event.vb_id, event.start_seqno)
            self.durable.apply(event)
        if point == "after effects":
            raise KilledError
        self.positions |= batch.positions
        if point == "after saving":
            raise KilledError

    def documents(self, vb_id: int) -> dict[bytes, bytes]:
        return self.durable.documents[vb_id]


class InAMirror:
    """`clients.mirror.mirror_state.take` on one of its stores; LMDB is opened anew after a
    death."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._store = MemoryStore() if path is None else LmdbStore(path, is_durable=False)

    @property
    def positions(self) -> dict[int, Position]:
        return self._store.positions()

    def take(self, batch: Batch, point: str | None, count: int) -> None:
        if self._path is None:
            # Dicts do not outlive a process, so nothing dies here.
            take(self._store, batch.events, batch.positions)
            return
        try:
            if point == "before effects":
                raise KilledError
            dies_at = {"between effects": count, "after effects": len(batch.events)}.get(point)
            take(self._store, until_killed(batch.events, dies_at), batch.positions)
            if point == "after saving":
                raise KilledError
        except KilledError:
            self._store.close()
            self._store = LmdbStore(self._path, is_durable=False)
            raise

    def documents(self, vb_id: int) -> dict[bytes, bytes]:
        of_all = {key: self._store.get(vb_id, key) for key in KEYS}
        documents = {key: value for key, value in of_all.items() if value is not None}
        assert self._store.count() >= len(documents)
        return documents


class KilledConsumer(ConsumerPair):
    """The pair of `test_consumer_pair`, with an application that dies."""

    kind = ""

    @initialize()
    def begin_user(self):
        self.folder = None
        if self.kind == "lmdb":
            self.folder = tempfile.mkdtemp(prefix="dcpd-killed-")
        self.user = {
            "transaction": InOneTransaction,
            "later": PositionsLater,
            "dicts": lambda: InAMirror(None),
            "lmdb": lambda: InAMirror(Path(self.folder or "", "mirror")),
        }[self.kind]()
        self.next_death = None

    @rule(point=st.sampled_from(POINTS), count=st.integers(0, 6))
    def die_soon(self, point, count):
        """The next batch kills the application there."""
        self.next_death = (point, count)

    @rule(
        changes=st.lists(
            st.tuples(st.sampled_from(VB_IDS), st.sampled_from(KEYS), st.booleans()),
            min_size=1, max_size=5,
        ),
        point=st.sampled_from([None, *POINTS]),
        count=st.integers(0, 6),
    )  # fmt: skip
    def change_deliver_and_die(self, changes, point, count):
        for vb_id, key, is_deletion in changes:
            if is_deletion:
                self.delete(vb_id, key)
            else:
                self.store(vb_id, key, 1)
        self.commit()
        # One batch for what was asked before, one for the changes.
        self.deliver([], 0)
        self.next_death = None if point is None else (point, count)
        self.deliver([], 0)

    @rule(back=st.integers(1, 6), vb_id=st.sampled_from(VB_IDS))
    def branch_while_it_is_dead(self, back, vb_id):
        self.next_death = ("after effects", 0)
        self.deliver([], 0)
        self.branch(vb_id, back)

    @rule(pieces=st.lists(st.integers(1, 90), max_size=6), handed_out=st.just(0))
    def deliver(self, pieces, handed_out):
        """Bring over what the server sends, cut anywhere; what is under way to the dead is lost."""
        data, peer = self.exchange(), self.peer
        for piece in [*pieces, len(data)]:
            if self.peer is not peer:
                return
            self.receive(data[:piece], handed_out)
            data = data[piece:]

    def receive(self, data, handed_out):
        if not data or not hasattr(self, "user"):
            return
        batch = self.core.receive(data, 0)
        (point, count), self.next_death = self.next_death or (None, 0), None
        try:
            self.user.take(batch, point, count)
        except KilledError:
            self.peer.session.state.producer and self.peer.session.state.producer.close()
            self.connect_consumer(
                {vb: Wanted(self.user.positions.get(vb, Position())) for vb in VB_IDS}
            )
            return
        self.core.processed(batch)

    def teardown(self):
        if not hasattr(self, "user") or not hasattr(self, "core"):
            return
        self.next_death = None
        self.node.commit()
        quiet = 0
        for _ in range(ROUNDS_MAX):
            data = self.exchange()
            self.receive(data, 0)
            self.core.tick(10**15)
            self.decide()
            quiet = 0 if data else quiet + 1
            if quiet == 3:
                break
        assert quiet == 3, "the consumer and the server never come to rest"
        for vb_id in VB_IDS:
            answers = {key: self.writer.ask(Opcode.GET, vb_id=vb_id, key=key) for key in KEYS}
            documents = {key: answer.value for key, answer in answers.items() if not answer.status}
            assert self.user.documents(vb_id) == documents, vb_id
        if self.folder is not None:
            self.user._store.close()
            shutil.rmtree(self.folder)


class WithOneTransaction(KilledConsumer):
    kind = "transaction"


class WithPositionsLater(KilledConsumer):
    kind = "later"


class WithDicts(KilledConsumer):
    kind = "dicts"


class WithLmdb(KilledConsumer):
    kind = "lmdb"


SETTINGS = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestWithOneTransaction = WithOneTransaction.TestCase
TestWithPositionsLater = WithPositionsLater.TestCase
TestWithDicts = WithDicts.TestCase
TestWithLmdb = WithLmdb.TestCase
for _case in (TestWithOneTransaction, TestWithPositionsLater, TestWithDicts, TestWithLmdb):
    _case.settings = SETTINGS
del _case
