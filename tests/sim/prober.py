"""A client that looks at many documents at once: scans, hashes, keys; and changes them in batches.

It does one thing after the other. What it was shown is a fact, with the time between its first
request and its last answer; a checker compares it with all that was ever committed (`sim.ledger`).

    RANGE_SCAN_CREATE, CONTINUE ...   documents of a partition as of one moment
    X_READ_HASHES                     hashes, keys and documents of a partition
    X_READ_VERSIONS                   versions as a copy takes them from another one; in clusters
    X_BATCH                           changes of several partitions together; for a node alone
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dcp.session.kv.scans import CONTINUE_EXTRAS, DOCUMENT_META, SCAN_ID_BYTES
from dcp.session.nodes.version_reads import RANGE, VersionsRead, read_answer
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.hash_reads import ASKED, SEQNO, What, documents_in, told, versions_in
from dcp.wire.message import BATCH_CHANGE, MUTATION_TOKEN, U32
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rules.repair import why_not_taken
from sim.facts import Batch, Facts, HashesRead, Kind, Operation, Outcome, Repair, Scanned
from sim.kv_link import CLIENT_FEATURES, KvLink, Request
from sim.machine import Machine
from sim.network import Network
from sim.node import SingleNode
from sim.plan import Plan
from sim.routing import Routing
from sim.twin_pages import put_in_place
from sim.workload import OUTCOMES, Workload
from sim.world import MS, Host
from vbucket.log.record import split_entries
from vbucket.model.entry import META, key_of, seqno_of
from vbucket.model.manifest import decode_leb128
from vbucket.store.environment import StoreDamagedError

JSON_DATATYPE: Final = 1
PAUSE_NS: Final = 30 * MS
BATCH_MAX: Final = 4
EVERYTHING: Final = json.dumps(
    {"range": {"start": b64encode(b"\0").decode(), "end": b64encode(b"\xff").decode()}}
).encode()
_MODES: Final = {Kind.SET: 0, Kind.ADD: 1, Kind.REPLACE: 2, Kind.DELETE: 3}
_KINDS: Final = (*(Kind.SET,) * 9, Kind.ADD, Kind.REPLACE, Kind.DELETE)

Then = Callable[[Frame], None]


class Prober:
    """See the module."""

    def __init__(
        self,
        network: Network,
        name: str,
        plan: Plan,
        facts: Facts,
        routing: Routing,
        machines: Sequence[Machine],
    ) -> None:
        self._machines = machines
        self.name = name
        self.host = Host(network.world, name)
        network.add(self.host)
        self._network = network
        self._world = network.world
        self._plan = plan
        self._facts = facts
        self._routing = routing
        self._workload = Workload(network.world, plan, name)
        self._links: dict[str, KvLink] = {}
        self._is_stopped = True
        self._node = ""
        """Whom the steps of what is under way ask."""

    def begin(self) -> None:
        """Go on; it must stand still."""
        if self._is_stopped:
            self._is_stopped = False
            self._pause()

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_stopped = True

    def _pause(self) -> None:
        self.host.after(int(PAUSE_NS * (0.2 + self._world.draw.expovariate(1))), self._next)

    def _next(self) -> None:
        if self._is_stopped:
            return
        plan, world = self._plan, self._world
        vb_id = world.below(plan.partitions)
        node = self._routing.node_of(vb_id)
        if node is None:
            self._pause()
            return
        self._node = node
        if world.chance(0.4):
            if plan.nodes == 1:
                self._batch()
            else:
                self._versions(vb_id)
        elif world.chance(0.5):
            self._scan(vb_id)
        else:
            self._hashes(vb_id)

    # -- one request -------------------------------------------------------------------------------

    def _ask(self, vb_id: int, packed: Callable[[int], bytes], then: Then) -> None:
        """Send a request; without a good answer, what is under way is given up."""

        def on_reply(_request: Request, frame: Frame | None, _why: str) -> None:
            if frame is None or frame.status not in _GOOD:
                if frame is not None and frame.status not in OUTCOMES | _GIVES_UP:
                    self._facts.problems.append(
                        f"{self.name}: answered 0x{frame.status:02x} {frame.value[:200]!r}"
                    )
                if frame is not None:
                    self._routing.refused(vb_id, self._node, frame.status, frame.value)
                self._pause()
            else:
                then(frame)

        self._link().ask(Request(self.name, lambda opaque, _: packed(opaque), on_reply))

    def _link(self) -> KvLink:
        link = self._links.get(self._node)
        if link is None:
            link = self._links[self._node] = KvLink(
                self._network, self.host, self._node, self._plan.timeout_ns,
                self._routing.lost, keeps_dialing=False,
                features=(*CLIENT_FEATURES, Feature.JSON),
            )  # fmt: skip
        return link

    # -- scans -------------------------------------------------------------------------------------

    def _scan(self, vb_id: int) -> None:
        began_ns, created_ns = self._world.now_ns, [0]
        found: dict[bytes, tuple[int, int, int, bytes]] = {}
        step = 1 + self._world.below(8)

        def go_on(scan_id: bytes) -> None:
            extras = CONTINUE_EXTRAS.pack(scan_id, step, 0, 0)
            self._ask(
                vb_id,
                lambda opaque: pack_request(
                    Opcode.RANGE_SCAN_CONTINUE, vb_id=vb_id, opaque=opaque, extras=extras
                ),
                lambda frame: take(scan_id, frame),
            )

        def created(frame: Frame) -> None:
            created_ns[0] = self._world.now_ns
            if frame.status == Status.KEY_ENOENT:
                end()
            else:
                assert len(frame.value) == SCAN_ID_BYTES
                go_on(frame.value)

        def take(scan_id: bytes, frame: Frame) -> None:
            if frame.status in {Status.OK, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE}:
                found.update(_scanned(frame.value))
            if frame.status == Status.RANGE_SCAN_MORE:
                self.host.after(self._world.below(10 * MS), go_on, scan_id)
            elif frame.status == Status.RANGE_SCAN_COMPLETE:
                end()
            else:
                self._pause()

        def end() -> None:
            self._facts.scans.append(Scanned(began_ns, created_ns[0], self.name, vb_id, found))
            self._pause()

        self._ask(
            vb_id,
            lambda opaque: pack_request(
                Opcode.RANGE_SCAN_CREATE, vb_id=vb_id, opaque=opaque, value=EVERYTHING,
                datatype=JSON_DATATYPE,
            ),
            created,
        )  # fmt: skip

    # -- hashes ------------------------------------------------------------------------------------

    def _hashes(self, vb_id: int) -> None:
        what = (What.HASHES, What.KEYS)[self._world.below(2)]
        began_ns = self._world.now_ns

        def take(frame: Frame) -> None:
            answer = told(frame)
            versions = None if what is What.HASHES else versions_in(frame.value)
            self._facts.hashes.append(
                HashesRead(
                    began_ns,
                    self._world.now_ns,
                    self.name,
                    vb_id,
                    answer.vb_uuid,
                    answer.seqno,
                    answer.documents,
                    frame.value if versions is None else b"",
                    versions,
                )
            )
            if versions:
                self._documents(vb_id, [version.seqno for version in versions])
            else:
                self._pause()

        value = b"" if what is What.HASHES else bytes(2)
        self._ask_hashes(vb_id, what, value, take)

    def _documents(self, vb_id: int, seqnos: list[int]) -> None:
        """Read the versions that were listed, as far as they are there."""

        def take(frame: Frame) -> None:
            answer = told(frame)
            self._facts.read_by_seqno += [
                (vb_id, answer.vb_uuid, document) for document in documents_in(frame.value)
            ]
            self._pause()

        self._ask_hashes(vb_id, What.DOCUMENTS, b"".join(map(SEQNO.pack, seqnos)), take)

    def _ask_hashes(self, vb_id: int, what: What, value: bytes, then: Then) -> None:
        extras = ASKED.pack(what, 0, 0)
        self._ask(
            vb_id,
            lambda opaque: pack_request(
                Opcode.X_READ_HASHES, vb_id=vb_id, opaque=opaque, extras=extras, value=value
            ),
            then,
        )

    # -- repairs -----------------------------------------------------------------------------------

    def _versions(self, vb_id: int) -> None:
        """A copy asks another one for versions, as if it could not read its own, and takes them if
        the rule says so (`dcp.server.cluster.repair.peer_repair`).
        """
        machines = [each for each in self._machines if isinstance(each.node, SingleNode)]
        self._world.draw.shuffle(machines)
        node = machines[0].node if len(machines) > 1 else None
        end = node.high_seqno(vb_id) if node is not None else 0
        if not isinstance(node, SingleNode) or not end:
            self._pause()
            return
        self._node, copy = machines[1].name, node
        first = 1 + self._world.below(end)
        last = min(end, first + self._world.below(4))

        def take(frame: Frame) -> None:
            if copy is machines[0].node:
                self._take_versions(copy, vb_id, (first, last), read_answer(frame))
            self._pause()

        extras = RANGE.pack(first, last)
        self._ask(
            vb_id,
            lambda opaque: pack_request(
                Opcode.X_READ_VERSIONS, vb_id=vb_id, opaque=opaque, extras=extras
            ),
            take,
        )

    def _take_versions(
        self, node: SingleNode, vb_id: int, seqnos: tuple[int, int], answer: VersionsRead
    ) -> None:
        part = node.engine.partitions[vb_id]
        why = why_not_taken(
            part.failover, answer.failover, seqnos[1],
            own_committed=part.committed_seqno, committed=answer.committed_seqno,
        )  # fmt: skip
        if why or part.incomplete_snapshot is not None:
            return
        try:
            with node._machine.env.as_written():
                own = node.engine.versions.entries(part, *seqnos, 1 << 30)
        except StoreDamagedError:
            return  # it knows a block as it was when its page was wrong
        entries = split_entries(answer.entries)
        self._facts.repairs.append(
            Repair(
                self._world.now_ns,
                node.name,
                self._node,
                vb_id,
                _versions_of(own),
                _versions_of(entries),
                put_in_place(node._machine.env, vb_id, entries),
            )
        )

    # -- batches -----------------------------------------------------------------------------------

    def _batch(self) -> None:
        world, workload = self._world, self._workload
        keys = [key for number, key in enumerate(self._plan.keys) if number % 4]
        world.draw.shuffle(keys)
        operations = []
        for key in keys[: 2 + world.below(BATCH_MAX - 1)]:
            operation = workload.operation(_KINDS[world.below(len(_KINDS))], key)
            if world.chance(self._plan.cas_share / 4) and operation.kind is not Kind.ADD:
                operation.cas_asked = workload.cas_of(key)
            operations.append(operation)
        if not operations:
            self._pause()
            return
        batch = Batch(f"{self.name} at {world.now_ns / MS:.3f}", operations)
        self._facts.batches.append(batch)
        first = operations[0]

        def packed(opaque: int, _has_durability: bool) -> bytes:
            for operation in operations:
                operation.invoked_ns = world.now_ns
            self._facts.operations += operations
            return pack_request(
                Opcode.X_BATCH, vb_id=first.vb_id, opaque=opaque,
                extras=U32.pack(len(operations)), key=b"\0" + first.key,
                value=b"".join(map(_packed, operations)),
            )  # fmt: skip

        def on_reply(request: Request, frame: Frame | None, why: str) -> None:
            self._take_batch(batch, request, frame, why)
            self._pause()

        self._link().ask(Request(batch.name, packed, on_reply))

    def _take_batch(self, batch: Batch, request: Request, frame: Frame | None, why: str) -> None:
        outcome = Outcome.AMBIGUOUS if request.was_sent else Outcome.REFUSED
        if frame is not None:
            found = OUTCOMES.get(frame.status)
            if found is None:
                self._facts.problems.append(
                    f"{batch.name}: answered 0x{frame.status:02x} {frame.value[:200]!r}"
                )
            elif found not in {Outcome.OK, Outcome.AMBIGUOUS}:
                outcome = Outcome.REFUSED
            else:
                outcome = found
        batch.outcome = outcome
        for number, operation in enumerate(batch.operations):
            operation.outcome, operation.why = outcome, why
            operation.ended_ns = self._world.now_ns
            if outcome is Outcome.OK and frame is not None:
                operation.cas = frame.cas
                token = MUTATION_TOKEN.unpack_from(frame.value, number * MUTATION_TOKEN.size)
                operation.vb_uuid, operation.seqno = token
                self._workload.learned(operation)
        if outcome is Outcome.REFUSED and request.was_sent:
            # Another document than its own may be why, so its answer says nothing of a document.
            refused = set(map(id, batch.operations))
            operations = self._facts.operations
            operations[:] = [each for each in operations if id(each) not in refused]


_GOOD: Final = frozenset(
    {Status.OK, Status.KEY_ENOENT, Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE}
)
_GIVES_UP: Final = dict.fromkeys((Status.RANGE_SCAN_CANCELLED, Status.ERANGE))
"""What scans and reads of versions may be answered beside what is in `OUTCOMES`."""


def _versions_of(entries: Iterable[bytes]) -> dict[int, tuple[bytes, int]]:
    return {seqno_of(entry): (key_of(entry), META.unpack_from(entry)[4]) for entry in entries}


def _packed(operation: Operation) -> bytes:
    key, value = operation.key, operation.argument
    head = BATCH_CHANGE.pack(
        _MODES[operation.kind],
        0,
        len(key),
        operation.flags,
        operation.lasts_s,
        operation.cas_asked,
        len(value),
    )
    return head + key + value


def _scanned(value: bytes) -> list[tuple[bytes, tuple[int, int, int, bytes]]]:
    """Return key -> (expiry, seqno, CAS, value) of an answer to RANGE_SCAN_CONTINUE."""
    found, at = [], 0
    while at < len(value):
        _, expiry_s, seqno, cas, _ = DOCUMENT_META.unpack_from(value, at)
        at += DOCUMENT_META.size
        pieces = []
        for _ in range(2):
            decoded = decode_leb128(value[at : at + 5])
            assert decoded is not None
            size, width = decoded
            pieces.append(value[at + width : at + width + size])
            at += width + size
        found.append((pieces[0], (expiry_s, seqno, cas, pieces[1])))
    return found
