"""What clients do: draws operations, packs them into frames, and reads what answers mean.

Every stored value is different from all others, so a checker can tell which write a read saw. One
key in four is a counter.
"""

from __future__ import annotations

from struct import Struct
from typing import Final
from zlib import crc32

from dcp.session.kv.with_meta import META_EXTRAS
from dcp.wire.frame import FLEX_HEADER, Frame, pack_request
from dcp.wire.message import MUTATION_TOKEN, OBSERVE_CURRENT, OBSERVE_OLD, U32, U64
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from sim.facts import LASTS_S, Kind, Observed, Operation, Outcome
from sim.plan import Plan
from sim.world import World
from vbucket.engine.documents.locks import LOCKED_CAS
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import encode_leb128

SYNC_WRITE_IMPOSSIBLE: Final = 0xA1
SYNC_WRITE_AMBIGUOUS: Final = 0xA3
DURABILITY_INVALID: Final = 0xA0
DURABILITY_FRAME: Final = 1
"""Id of the frame info that asks for durability: u8 level, u16 timeout in ms."""
_STORE_EXTRAS: Final = Struct(">II")
_EXPIRY: Final = Struct(">I")
_PATH_EXTRAS: Final = bytes(3)
"""No path, no path flags; an expiry may follow."""
_MAKES_DOCUMENT: Final = b"\1"
"""The document's flag that makes it where there is none."""
_COUNTER_EXTRAS: Final = Struct(">QQI")
_COUNTS: Final = ((b"1", 5), (b"10", None), (b"100", 5))
"""Delta and initial number. They are few, so that equal writes without an answer are one case for
the checker."""
_NO_INITIAL: Final = 0xFFFF_FFFF

_OPCODES: Final = {
    Kind.GET: Opcode.GET, Kind.SET: Opcode.SET, Kind.ADD: Opcode.ADD, Kind.REPLACE: Opcode.REPLACE,
    Kind.DELETE: Opcode.DELETE, Kind.INCREMENT: Opcode.INCREMENT, Kind.APPEND: Opcode.APPEND,
    Kind.TOUCH: Opcode.TOUCH, Kind.GET_AND_TOUCH: Opcode.GAT, Kind.GET_REPLICA: Opcode.GET_REPLICA,
    Kind.OBSERVE: Opcode.OBSERVE_SEQNO, Kind.PUSH: Opcode.SUBDOC_ARRAY_PUSH_LAST,
    Kind.SET_WITH_META: Opcode.SET_WITH_META, Kind.GET_AND_LOCK: Opcode.GET_AND_LOCK,
    Kind.UNLOCK: Opcode.UNLOCK,
}  # fmt: skip
_TOUCHES: Final = frozenset({Kind.TOUCH, Kind.GET_AND_TOUCH})
_STORES: Final = frozenset({Kind.SET, Kind.ADD, Kind.REPLACE})
_WITH_CAS: Final = frozenset({Kind.SET, Kind.REPLACE, Kind.DELETE, Kind.APPEND})
READS: Final = frozenset({Kind.GET, Kind.GET_REPLICA, Kind.OBSERVE})
_WITH_EXPIRY: Final = _STORES | {Kind.INCREMENT, Kind.PUSH}
_WITH_VALUE: Final = frozenset({Kind.GET, Kind.GET_REPLICA, Kind.GET_AND_TOUCH, Kind.GET_AND_LOCK})
_OF_COUNTERS: Final = frozenset({Kind.GET, Kind.INCREMENT, Kind.DELETE})

OUTCOMES: Final[dict[int, Outcome]] = {
    Status.OK: Outcome.OK,
    Status.KEY_ENOENT: Outcome.ABSENT,
    Status.KEY_EEXISTS: Outcome.EXISTS,
    Status.NOT_STORED: Outcome.NOT_STORED,
    Status.DELTA_BADVAL: Outcome.NOT_A_NUMBER,
    Status.ETMPFAIL: Outcome.REFUSED,
    Status.EBUSY: Outcome.REFUSED,
    Status.NOT_MY_VBUCKET: Outcome.REFUSED,
    Status.EINTERNAL: Outcome.REFUSED,
    Status.UNKNOWN_COLLECTION: Outcome.NO_COLLECTION,
    Status.LOCKED: Outcome.LOCKED,
    Status.NOT_LOCKED: Outcome.NOT_LOCKED,
    DURABILITY_INVALID: Outcome.REFUSED,
    SYNC_WRITE_IMPOSSIBLE: Outcome.REFUSED,
    SYNC_WRITE_AMBIGUOUS: Outcome.AMBIGUOUS,
}
"""What each status tells the client. A status that is not here must not occur. EINTERNAL: what it
takes is damaged; a node that says so of sound data is a problem (`SingleNode.met`)."""


class Workload:
    """Draws the operations of one client."""

    def __init__(self, world: World, plan: Plan, client: str) -> None:
        self._world = world
        self._plan = plan
        self._client = client
        self._count = 0
        self._cas: dict[bytes, int] = {}
        """The CAS that the client saw last, by key."""
        self._choices = _cumulative(plan.kind_weights)

    def draw(self) -> Operation:
        """Return the next operation."""
        world, plan = self._world, self._plan
        index = world.below(len(plan.keys))
        kind = self._draw_kind()
        if index % 4 == 0 and kind not in _OF_COUNTERS:
            kind = Kind.INCREMENT
        elif index % 4 and kind is Kind.INCREMENT and world.chance(0.8):
            kind = Kind.SET
        key = plan.keys[index]
        operation = self.operation(kind, key)
        if kind in _WITH_CAS and key in self._cas and world.chance(plan.cas_share):
            operation.cas_asked = self._cas[key]
        if kind is not Kind.GET and world.chance(plan.durability_share):
            operation.level = 1 + world.below(3)
        return operation

    def _draw_kind(self) -> Kind:
        drawn = self._world.draw.random() * self._choices[-1]
        for kind, limit in zip(self._plan.kinds, self._choices, strict=True):
            if drawn < limit:
                return kind
        return Kind.GET

    def operation(self, kind: Kind, key: bytes, collection: int = 0) -> Operation:
        """Return an operation on a key; what it stores is unique."""
        world, plan = self._world, self._plan
        self._count += 1
        operation = Operation(
            self._client, self._count, kind, vbucket_of(key, plan.partitions), key,
            collection=collection,
        )  # fmt: skip
        if kind in _STORES:
            operation.argument = operation.name.encode() + b"." * world.below(plan.value_bytes + 1)
        elif kind is Kind.APPEND:
            operation.argument = b"+" + operation.name.encode()
        elif kind is Kind.PUSH:
            operation.argument = b'"' + operation.name.encode() + b'"'
        elif kind is Kind.SET_WITH_META:
            operation.argument = operation.name.encode()
        elif kind is Kind.INCREMENT:
            operation.argument, operation.initial = _COUNTS[world.below(len(_COUNTS))]
        number = crc32(operation.name.encode())  # nothing is drawn for these
        operation.flags = number * (number % 3 > 0)
        # In clusters, requests and stores that are damaged stay as recorded seeds have them.
        may_last = plan.nodes == 1 or not (plan.scrub_ns or kind is Kind.PUSH)
        if kind in _WITH_EXPIRY and may_last and not collection and number % 4 == 0:
            operation.lasts_s = LASTS_S + number % 1000
        return operation

    def cas_of(self, key: bytes) -> int:
        """Return the CAS that the client saw last of a key; 0: none."""
        return self._cas.get(key, 0)

    def learned(self, operation: Operation) -> None:
        """Keep the CAS of an answer."""
        if operation.cas:
            self._cas[operation.key] = operation.cas


def _cumulative(weights: tuple[float, ...]) -> list[float]:
    total, sums = 0.0, []
    for weight in weights:
        total += weight
        sums.append(total)
    return sums


def pack(operation: Operation, opaque: int, *, has_durability: bool) -> bytes:
    """Return the request's packet. A durability frame is only sent where the server knows it."""
    kind, key = operation.kind, encode_leb128(operation.collection) + operation.key
    extras, value = b"", b""
    if kind in _STORES:
        expiry_s = operation.expiry_s or operation.lasts_s
        extras, value = _STORE_EXTRAS.pack(operation.flags, expiry_s), operation.argument
    elif kind in _TOUCHES:
        extras = _EXPIRY.pack(operation.expiry_s)
    elif kind is Kind.OBSERVE:
        key, value = b"", U64.pack(operation.vb_uuid)
    elif kind is Kind.GET_AND_LOCK:
        extras = U32.pack(operation.lock_s)
    elif kind is Kind.PUSH:
        expiry = _EXPIRY.pack(operation.lasts_s) if operation.lasts_s else b""
        extras, value = _PATH_EXTRAS + expiry + _MAKES_DOCUMENT, operation.argument
    elif kind is Kind.SET_WITH_META:
        extras = META_EXTRAS.pack(operation.flags, 0, operation.rev_seqno, operation.initial)
        value = operation.argument
    elif kind is Kind.APPEND:
        value = operation.argument
    elif kind is Kind.INCREMENT:
        initial = operation.initial
        expiry = _NO_INITIAL if initial is None else operation.lasts_s
        extras = _COUNTER_EXTRAS.pack(int(operation.argument), initial or 0, expiry)
    opcode, vb_id, cas = _OPCODES[kind], operation.vb_id, operation.cas_asked
    if not (operation.level and has_durability):
        operation.level = 0
        return pack_request(
            opcode, vb_id=vb_id, opaque=opaque, cas=cas, extras=extras, key=key, value=value
        )
    framing = bytes((DURABILITY_FRAME << 4 | 1, operation.level))
    body = framing + extras + key + value
    head = FLEX_HEADER.pack(
        Magic.FLEX_REQUEST, opcode, len(framing), len(key), len(extras), 0, vb_id, len(body),
        opaque, cas,
    )  # fmt: skip
    return head + body


def read_answer(operation: Operation, frame: Frame) -> Outcome | None:
    """Take over what an answer tells; None: its status must not occur."""
    outcome = OUTCOMES.get(frame.status)
    operation.why = f"status 0x{frame.status:02x}"
    if outcome is None:
        return None
    if outcome is Outcome.OK:
        operation.cas = frame.cas
        if operation.kind is Kind.OBSERVE:
            operation.observed = seen = _observed(operation.vb_uuid, frame.value)
            operation.vb_uuid, operation.seqno = seen.vb_uuid, seen.persisted_seqno
        elif operation.kind in _WITH_VALUE:
            operation.value = frame.value
            operation.flags = int.from_bytes(frame.extras[-4:], "big")
            _take_lock(operation)
        elif len(frame.extras) == MUTATION_TOKEN.size:
            operation.vb_uuid, operation.seqno = MUTATION_TOKEN.unpack(frame.extras)
        if operation.kind is Kind.INCREMENT and len(frame.value) == U64.size:
            operation.value = b"%d" % U64.unpack(frame.value)[0]
    return outcome


def _observed(asked_uuid: int, answer: bytes) -> Observed:
    """Return what an OBSERVE_SEQNO was answered: form 0 is of the newest version, form 1 of one
    that has ended, and names it.
    """
    if not answer[0]:
        return Observed(asked_uuid, *OBSERVE_CURRENT.unpack(answer)[2:], None)
    *_, vb_uuid, persisted_seqno, seqno, told_uuid, ended_seqno = OBSERVE_OLD.unpack(answer)
    end = ended_seqno if told_uuid == asked_uuid else None
    return Observed(asked_uuid, vb_uuid, persisted_seqno, seqno, end)


def _take_lock(operation: Operation) -> None:
    """Keep the CAS of a lock apart from that of a document: nobody is told the latter."""
    operation.is_locked = operation.cas == LOCKED_CAS
    if operation.kind is Kind.GET_AND_LOCK:
        operation.lock_cas = operation.cas
    if operation.is_locked or operation.kind is Kind.GET_AND_LOCK:
        operation.cas = 0


def unanswered(operation: Operation) -> Outcome:
    """Return what a client knows of an operation without an answer."""
    return Outcome.UNKNOWN if operation.kind in READS else Outcome.AMBIGUOUS
