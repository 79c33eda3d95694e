"""What a server has answered and therefore must hold.

`Ledger`: documents of a server that may die while they are written. For each key it has the last
answered value and the values that were sent later without an answer. The server must hold one of
these. A refused change has no effect.

`History`: every change of a folder or archive that is damaged later, by partition and seqno, so
that the state at any seqno is known.

A value names its key and number (`value_of`), and a document's flags follow from its key. So a
reader notices if it gets one document instead of another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from zlib import crc32

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import MUTATION_TOKEN, parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from tests.soak.attack.case import AttackError, Case, Fault
from tests.soak.kill_writer import Stored, value_of
from vbucket.model.ids import vbucket_of

GETS_AT_ONCE: Final = 500
NAMED_MAX: Final = 3
"""Keys named in a failure."""

__all__ = ["History", "Ledger", "Stored", "value_of"]


def flags_of(key: bytes) -> int:
    """Return the flags of a key's document."""
    return crc32(key) & 0xFFFF


def set_packet(key: bytes, value: bytes, expiry: int = 0) -> bytes:
    extras = struct.pack(">II", flags_of(key), expiry)
    return pack_request(Opcode.SET, key=key, value=value, extras=extras, vb_id=vbucket_of(key))


def delete_packet(key: bytes) -> bytes:
    return pack_request(Opcode.DELETE, key=key, vb_id=vbucket_of(key))


def keys_in(vb_ids: Iterable[int], count: int, prefix: bytes = b"key") -> list[bytes]:
    """Return `count` keys of these partitions."""
    wanted, keys, number = frozenset(vb_ids), [], 0
    while len(keys) < count:
        key = b"%s-%07d" % (prefix, number)
        if vbucket_of(key) in wanted:
            keys.append(key)
        number += 1
    return keys


def with_tokens(client: RawClient) -> RawClient:
    """Negotiate mutation tokens: answers to changes then carry version and seqno."""
    features = (Feature.XERROR, Feature.MUTATION_SEQNO)
    value = b"".join(int(feature).to_bytes(2, "big") for feature in features)
    assert not client.ask(Opcode.HELLO, value=value).status
    return client


def receive(client: RawClient) -> Frame:
    """Return the next answer. Raises AttackError if the server closes."""
    frame = client.receive()
    if frame is None:
        raise AttackError(Fault.BROKEN, "the server closed a connection without a reason")
    return frame


def get_all(client: RawClient, keys: list[bytes]) -> dict[bytes, Frame]:
    """GET all keys."""
    found: dict[bytes, Frame] = {}
    for at in range(0, len(keys), GETS_AT_ONCE):
        some = keys[at : at + GETS_AT_ONCE]
        client.send(
            b"".join(pack_request(Opcode.GET, key=key, vb_id=vbucket_of(key)) for key in some)
        )
        for key in some:
            found[key] = receive(client)
    return found


def words_of(frame: Frame) -> str:
    """Return the status of an answer, and its text if it is an error."""
    if not frame.status:
        return "OK"
    name = Status(frame.status).name if frame.status in list(Status) else f"0x{frame.status:02x}"
    try:
        return f"{name}: {context_of(frame)}"
    except (ValueError, KeyError, TypeError):
        return name


class Reading(NamedTuple):
    """The result of GETs of all keys."""

    wrong: list[str]
    """Keys with another value, other flags or CAS than stored, or with a deleted document."""
    missing: list[bytes]
    """Keys that the server says are absent."""
    refused: dict[bytes, str]
    """Keys whose GET was an error, and its text."""

    def check(self) -> None:
        """Require that every answer was right."""
        self.check_nothing_wrong()
        if self.missing:
            raise AttackError(Fault.WRONG, f"not there: {some_of(self.missing)}")
        if self.refused:
            key, text = next(iter(self.refused.items()))
            more = f"{len(self.refused)} GETs were refused, the first of {key!r}: {text}"
            raise AttackError(Fault.WRONG, more)

    def check_nothing_wrong(self) -> None:
        if self.wrong:
            raise AttackError(Fault.WRONG, f"{len(self.wrong)} documents: {self.wrong[0]}")


def some_of(keys: list[bytes]) -> str:
    more = f" and {len(keys) - NAMED_MAX} more" if len(keys) > NAMED_MAX else ""
    return ", ".join(repr(key) for key in keys[:NAMED_MAX]) + more


class Known(NamedTuple):
    """What a GET may return: the last answered value, or one that was sent without an answer."""

    answered: Stored | None
    unanswered: tuple[bytes | None, ...] = ()

    def problem(self, key: bytes, frame: Frame) -> str:
        """Return what is wrong with the answer to a GET, "" if nothing is."""
        value = None if frame.status == Status.KEY_ENOENT else frame.value
        if value in self.unanswered:
            return ""
        if self.answered is None or value is None:
            if value is None and self.answered is None:
                return ""
            return f"{key!r} is {value!r:.90}, answered was {self.answered!r:.90}"
        if value != self.answered.value:
            return f"{key!r} is {value!r:.90}, answered was {self.answered.value!r:.90}"
        if frame.cas != self.answered.cas:
            return f"{key!r} has CAS {frame.cas}, answered was {self.answered.cas}"
        if int.from_bytes(frame.extras, "big") != flags_of(key):
            return f"{key!r} has flags {frame.extras.hex()}"
        return ""


def judge(frames: Mapping[bytes, Frame], known: Mapping[bytes, Known]) -> Reading:
    """Compare answers to GETs with what is known."""
    reading = Reading([], [], {})
    for key, frame in frames.items():
        if frame.status not in {Status.OK, Status.KEY_ENOENT}:
            reading.refused[key] = words_of(frame)
        elif problem := known[key].problem(key, frame):
            if frame.status:
                reading.missing.append(key)
            else:
                reading.wrong.append(problem)
    return reading


class Ledger:
    """See the module. Changes of one key are sent one after the other."""

    def __init__(self) -> None:
        self.known: dict[bytes, Known] = {}
        self._sent: dict[bytes, bytes | None] = {}
        self._max_cas: dict[int, int] = {}

    def send(self, key: bytes, value: bytes | None) -> None:
        """Note a change that is being sent; None: a deletion."""
        assert key not in self._sent
        self._sent[key] = value

    def answered(self, key: bytes, frame: Frame) -> None:
        """Note an answer: the change happened, or was refused."""
        value = self._sent.pop(key)
        if frame.status == Status.KEY_ENOENT and value is None:
            before = self.known.get(key, Known(None))
            if before.answered is not None and None not in before.unanswered:
                text = f"{key!r}: a DELETE found nothing, answered was {before.answered!r:.90}"
                raise AttackError(Fault.WRONG, text)
            self.known[key] = Known(None)
        elif not frame.status:
            vb_id = vbucket_of(key)
            if frame.cas <= self._max_cas.get(vb_id, 0):
                text = f"vb {vb_id}: CAS {frame.cas} after {self._max_cas[vb_id]}"
                raise AttackError(Fault.WRONG, text)
            self._max_cas[vb_id] = frame.cas
            self.known[key] = Known(None if value is None else Stored(value, frame.cas))
        else:
            self.known.setdefault(key, Known(None))

    def cut_off(self) -> None:
        """No more answers will come: the unanswered changes may have happened or not."""
        for key, value in self._sent.items():
            before = self.known.get(key, Known(None))
            self.known[key] = Known(before.answered, (*before.unanswered, value))
        self._sent.clear()

    @property
    def open_vbs(self) -> frozenset[int]:
        """Partitions with changes that were never answered."""
        return frozenset(vbucket_of(key) for key, item in self.known.items() if item.unanswered)

    def read(self, client: RawClient, *, leaves_out: frozenset[int] = frozenset()) -> Reading:
        """GET all keys and compare; then the found values become the known ones."""
        keys = [key for key in self.known if vbucket_of(key) not in leaves_out]
        frames = get_all(client, keys)
        reading = judge(frames, self.known)
        for key, frame in frames.items():
            if frame.status == Status.OK:
                self.known[key] = Known(Stored(frame.value, frame.cas))
            elif frame.status == Status.KEY_ENOENT:
                self.known[key] = Known(None)
        return reading


class Change(NamedTuple):
    """One change of a partition; `value` None: a deletion."""

    seqno: int
    key: bytes
    value: bytes | None
    cas: int


Wanted = tuple[bytes, bytes | None, int]
"""A change to make: key, value (None: delete it), expiry."""


class Place(NamedTuple):
    """A consumer's position in a partition."""

    vb_uuid: int
    seqno: int


class History:
    """See the module. Written by one client, in order."""

    def __init__(self, vb_ids: Iterable[int]) -> None:
        self.changes: dict[int, list[Change]] = {vb_id: [] for vb_id in vb_ids}
        self._undone: dict[int, list[list[Change]]] = {vb_id: [] for vb_id in self.changes}
        """States of partitions before they were branched."""

    @property
    def keys(self) -> list[bytes]:
        return list({change.key: None for row in self.changes.values() for change in row})

    def write(self, client: RawClient, changes: list[Wanted]) -> None:
        """Make changes, all of which must be stored."""
        for at in range(0, len(changes), GETS_AT_ONCE):
            some = changes[at : at + GETS_AT_ONCE]
            client.send(
                b"".join(
                    delete_packet(key) if value is None else set_packet(key, value, expiry)
                    for key, value, expiry in some
                )
            )
            for key, value, _ in some:
                self.answered(key, value, receive(client))

    def answered(self, key: bytes, value: bytes | None, frame: Frame) -> None:
        """Record a change by its answer, which has its mutation token."""
        if frame.status == Status.KEY_ENOENT and value is None:
            return
        if frame.status:
            raise AttackError(Fault.BROKEN, f"{key!r} was refused: {words_of(frame)}")
        _, seqno = MUTATION_TOKEN.unpack(frame.extras)
        self.changes[vbucket_of(key)].append(Change(seqno, key, value, frame.cas))

    def high_seqno(self, vb_id: int) -> int:
        row = self.changes[vb_id]
        return row[-1].seqno if row else 0

    def state(self, vb_id: int, seqno: int | None = None) -> dict[bytes, Stored]:
        """Return a partition's documents at a seqno, by default at the end."""
        documents: dict[bytes, Stored] = {}
        for change in self.changes[vb_id]:
            if seqno is not None and change.seqno > seqno:
                break
            if change.value is None:
                documents.pop(change.key, None)
            else:
                documents[change.key] = Stored(change.value, change.cas)
        return documents

    def known(self, seqnos: Mapping[int, int] | None = None) -> dict[bytes, Known]:
        """Return what each key must hold, at the end or at these seqnos by partition."""
        known: dict[bytes, Known] = dict.fromkeys(self.keys, Known(None))
        for vb_id in self.changes:
            at = None if seqnos is None else seqnos.get(vb_id)
            known.update({key: Known(item) for key, item in self.state(vb_id, at).items()})
        return known

    def branch(self, vb_id: int, seqno: int) -> None:
        """Record that a partition's changes above a seqno were undone."""
        row = self.changes[vb_id]
        self._undone[vb_id].append(list(row))
        self.changes[vb_id] = [change for change in row if change.seqno <= seqno]

    def was_ever(self, vb_id: int, documents: Mapping[bytes, bytes]) -> bool:
        """Return whether a partition ever held exactly these documents."""
        if not documents:
            return True
        for row in (self.changes[vb_id], *self._undone[vb_id]):
            state: dict[bytes, bytes] = {}
            for change in row:
                if change.value is None:
                    state.pop(change.key, None)
                else:
                    state[change.key] = change.value
                if state == documents:
                    return True
        return False

    def has_had(self, vb_id: int, key: bytes, value: bytes) -> bool:
        """Return whether a key ever had this value."""
        rows = (self.changes[vb_id], *self._undone[vb_id])
        return any(change.key == key and change.value == value for row in rows for change in row)


def high_seqnos(client: RawClient) -> dict[int, int]:
    return parse_vb_seqnos(client.ask(Opcode.GET_ALL_VB_SEQNOS).value)


def places(client: RawClient, vb_ids: Iterable[int]) -> dict[int, Place]:
    """Return the position of a consumer that has everything of these partitions now."""
    seqnos, found = high_seqnos(client), {}
    for vb_id in vb_ids:
        frame = client.ask(Opcode.GET_FAILOVER_LOG, vb_id=vb_id)
        found[vb_id] = Place(parse_failover_log(frame.value)[0][0], seqnos[vb_id])
    return found


def check_holds(
    case: Case, client: RawClient, ledger: Ledger, *, leaves_out: frozenset[int] = frozenset()
) -> None:
    """Require that a server holds every answered change."""
    ledger.read(client, leaves_out=leaves_out).check()
    case.demand(ledger.known, Fault.BROKEN, "nothing was ever answered")
