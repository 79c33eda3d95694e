"""Checks of a server: what one is, what it may ask for, and how it is judged.

A check is a function that talks to the server through its `Run` and raises why it does not hold. It
stands for one sentence of the public protocol documents. The checks are in `checks`.
"""

from __future__ import annotations

import os
import re
import shlex
import ssl
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import pack as struct_pack
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from clients.conformance import packet as p
from clients.conformance.packet import MalformedError, Packet
from clients.conformance.wire import Exchange, Stream, Wire, WireError, connect

PASS, FAIL, REFUSED, NOT_APPLICABLE = "pass", "fail", "refused", "n/a"
OUTCOMES: Final = (PASS, FAIL, REFUSED, NOT_APPLICABLE)
_ENTRY_BYTES: Final = 10
"""A partition and its seqno, in GET_ALL_VB_SEQNOS."""
HOOKS: Final = ("branch", "purge", "collection", "collection-drop")
"""What a check may need that the protocol has no unprivileged command for."""
QUIET_S: Final = 0.3
"""How long a check listens to see that nothing comes."""

MUTATION_SEQNO, XATTR, XERROR, SELECT, SNAPPY, JSON, COLLECTIONS = 4, 6, 7, 8, 0x0A, 0x0B, 0x12
PLAIN_FEATURES: Final = (MUTATION_SEQNO, XATTR, XERROR, SELECT, JSON)
"""What connections of checks ask for, unless the check says otherwise."""


class FaultError(Exception):
    """The server does not do what the sentence says. The text says what it does."""


class RefusedError(Exception):
    """The server says that it does not have this, as the documents allow."""


class NotApplicableError(Exception):
    """The check cannot be made on this server. The text says why."""


class Check(NamedTuple):
    """One sentence of the documents, and how to see it."""

    id: str
    sentence: str
    """Quoted from the page."""
    page: str
    """Path of the page in kv_engine."""
    does: Callable[[Run], None]
    title: str
    """What is sent, and what has to come."""

    @property
    def group(self) -> str:
        """What comes before the dot of its id."""
        return self.id.partition(".")[0]


class Result(NamedTuple):
    """What came of a check."""

    check: Check
    outcome: str
    reason: str
    took_s: float
    exchange: tuple[str, ...]
    """The packets, decoded, of a check that did not pass."""


class Target(NamedTuple):
    """The judged server, and how checks reach it."""

    host: str
    port: int
    user: str = ""
    """"": no login."""
    password: str = ""
    bucket: str = "default"
    timeout_s: float = 5.0
    hooks: Mapping[str, str] = MappingProxyType({})
    """Hook -> the command that does it; see `Run.hook`."""
    tls: ssl.SSLContext | None = None
    environment: Mapping[str, str] = MappingProxyType({})
    """What hooks find in their environment besides this process's."""


UNREADABLE: Final = "the check did not expect what the server sent"
"""Begins the reason if a check did not see what it reads: a fault of the server, and of the check,
which should say what is missing.
"""
CHECKS: Final[dict[str, Check]] = {}
"""Id -> check, in the order of the documents' reader: connection first."""


def check(
    check_id: str, sentence: str, page: str
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Make a function a check. Its docstring is the title."""

    def register(does: Callable[[Run], None]) -> Callable[[Run], None]:
        add(check_id, sentence, page, (does.__doc__ or "").strip(), does)
        return does

    return register


def add(check_id: str, sentence: str, page: str, title: str, does: Callable[[Run], None]) -> None:
    """Add a check to the table."""
    assert check_id not in CHECKS, check_id
    CHECKS[check_id] = Check(check_id, sentence, page, does, " ".join(title.split()))


def need(condition: bool, otherwise: str) -> None:
    """Fail with the text unless the condition holds."""
    if not condition:
        raise FaultError(otherwise)


def need_status(answer: Packet, *statuses: int, may_refuse: bool = False) -> Packet:
    """Fail unless an answer has one of the statuses, OK by default; return it.

    With `may_refuse`, a server that does not have what was asked says so and is not at fault.
    """
    statuses = statuses or (p.OK,)
    if may_refuse and answer.field in p.REFUSALS and answer.field not in statuses:
        name = p.opcode_name(answer.opcode)
        raise RefusedError(f"{name} is answered {p.status_name(answer.field)}")
    wanted = " or ".join(map(p.status_name, statuses))
    need(
        answer.field in statuses,
        f"{p.opcode_name(answer.opcode)} is answered {p.status_name(answer.field)}, not {wanted}",
    )
    return answer


def need_parts(
    packet: Packet, *, extras: int = 0, key: int | None = 0, value: bool = False
) -> None:
    """Fail unless a packet has extras and a key of these sizes, and a value or none."""
    name = p.opcode_name(packet.opcode)
    need(len(packet.extras) == extras, f"{name} has {len(packet.extras)} bytes of extras")
    need(key is None or len(packet.key) == key, f"{name} has a key of {len(packet.key)} bytes")
    need(value or not packet.value, f"{name} has a value: {p.shown(packet.value)}")


class Written(NamedTuple):
    """A change that a check made."""

    uuid: int
    seqno: int
    cas: int


class Run:
    """One check in the making: its connections, its partition, and the exchange."""

    def __init__(self, target: Target, vb_id: int, name: str) -> None:
        self.target = target
        self.vb = vb_id
        """An active partition. Other checks may have written to it."""
        self.name = name
        """Begins the names of connections and keys."""
        self.exchange = Exchange()
        self._wires: list[Wire] = []

    def close(self) -> None:
        """Close all connections."""
        for wire in self._wires:
            wire.close()

    # -- connections -----------------------------------------------------------------------------

    def raw(self) -> Wire:
        """Connect, and send nothing."""
        target = self.target
        wire = connect(target.host, target.port, target.timeout_s, self.exchange, target.tls)
        self._wires.append(wire)
        return wire

    def logged_in(self, *features: int) -> Wire:
        """Connect, say HELLO with these features besides the usual ones, and log in."""
        wire = self.raw()
        need_status(wire.hello((*PLAIN_FEATURES, *features)), p.OK)
        if self.target.user:
            plain = f"\0{self.target.user}\0{self.target.password}".encode()
            need_status(wire.ask(p.SASL_AUTH, key=b"PLAIN", value=plain), p.OK)
        return wire

    def kv(self, *features: int) -> Wire:
        """Return a connection with a bucket. Without a feature, the check is not applicable."""
        wire = self.logged_in(*features)
        need_status(wire.ask(p.SELECT_BUCKET, key=self.target.bucket.encode()), p.OK)
        if missing := set(features) - wire.features:
            names = ", ".join(f"0x{feature:02x}" for feature in sorted(missing))
            raise NotApplicableError(f"HELLO does not grant the features {names}")
        return wire

    def dcp(
        self,
        *features: int,
        flags: int = 1,
        name: str = "",
        controls: Sequence[tuple[str, str]] = (),
    ) -> Wire:
        """Return an open producer connection with NOOPs on, which collections need."""
        wire = self.kv(*features)
        need_status(wire.open(name or self.dcp_name(), flags), p.OK)
        for key, value in (("enable_noop", "true"), *controls):
            answer = wire.control(key, value)
            if answer.field in {p.EINVAL, *p.REFUSALS}:
                raise RefusedError(f"control {key}={value}: {p.status_name(answer.field)}")
            need_status(answer, p.OK)
        return wire

    def dcp_name(self) -> str:
        """Return a name for another DCP connection of this check."""
        return f"conformance:{self.name}-{len(self._wires)}"

    # -- documents -------------------------------------------------------------------------------

    def key(self, number: int = 0) -> bytes:
        """Return a key of this check."""
        return f"conformance:{self.name}:{number}".encode()

    def write(self, wire: Wire, key: bytes, value: bytes = b"v", **how: Any) -> Written:
        """Store a document; `how` has flags, expiry, and fields of the packet."""
        extras = struct_pack(">II", how.pop("flags", 0), how.pop("expiry", 0))
        answer = need_status(wire.ask(p.SET, self.vb, key=key, value=value, extras=extras, **how))
        return self._written(wire, answer)

    def delete(self, wire: Wire, key: bytes) -> Written:
        """Delete a document."""
        return self._written(wire, need_status(wire.ask(p.DELETE, self.vb, key=key)))

    @staticmethod
    def _written(wire: Wire, answer: Packet) -> Written:
        if MUTATION_SEQNO not in wire.features:
            return Written(0, 0, answer.cas)
        uuid, seqno = answer.unpack("QQ")
        return Written(uuid, seqno, answer.cas)

    def fill(self, wire: Wire, count: int, value: bytes = b"v") -> list[Written]:
        """Store documents with the keys 0 to count - 1."""
        return [self.write(wire, self.key(number), value) for number in range(count)]

    def high(self, wire: Wire) -> tuple[int, int]:
        """Return the partition's newest uuid and its high seqno, by a change that is made."""
        written = self.write(wire, self.key(999_999))
        return written.uuid, written.seqno

    # -- streams ---------------------------------------------------------------------------------

    def opened(self, wire: Wire, start: int = 0, **how: Any) -> Stream:
        """Open a stream that has to be answered OK."""
        stream = wire.stream(self.vb, start, **how)
        if stream.answer.field == p.ROLLBACK and start == 0:
            raise FaultError("a stream from 0 with uuid 0 is told to roll back")
        need_status(stream.answer, p.OK)
        return stream

    def complete(self, wire: Wire, start: int = 0, **how: Any) -> list[Packet]:
        """Return all messages of a stream up to its end, which has to come."""
        stream = self.opened(wire, start, **how)
        return ended(wire, stream)

    # -- hooks -----------------------------------------------------------------------------------

    def hook(self, name: str, **facts: object) -> str:
        """Run the command of a hook, with the facts in its {braces}; return what it printed."""
        command = self.target.hooks.get(name, "")
        if not command:
            raise NotApplicableError(f"--{name}-command is not given")
        try:
            words = [word.format(vb=self.vb, **facts) for word in shlex.split(command)]
        except (KeyError, IndexError, ValueError) as error:
            why = f"--{name}-command cannot be filled in: {error}; there are vb, {', '.join(facts)}"
            raise NotApplicableError(why) from None
        self.exchange.note(0, "-", f"runs {' '.join(words)}")
        try:
            ran = subprocess.run(  # noqa: S603 - the user's own command
                words, capture_output=True, text=True, timeout=60, check=False,
                stdin=subprocess.DEVNULL, env={**os.environ, **self.target.environment},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotApplicableError(f"--{name}-command did not work: {error}") from None
        if ran.returncode:
            said = (ran.stderr or ran.stdout).strip()[-300:]
            raise NotApplicableError(f"--{name}-command ended with {ran.returncode}: {said}")
        return ran.stdout


def ended(wire: Wire, stream: Stream) -> list[Packet]:
    """Return a stream's messages, up to its STREAM_END."""
    return wire.messages(lambda each: each.opcode == p.STREAM_END and each.opaque == stream.opaque)


def judge(one: Check, target: Target, vb_id: int) -> Result:
    """Make a check."""
    begun_s = time.monotonic()
    name = re.sub(r"[^a-z0-9]", "-", one.id)
    run = Run(target, vb_id, f"{name}-{time.time_ns() % 10**9:09}")
    outcome, reason = PASS, ""
    try:
        one.does(run)
    except FaultError as error:
        outcome, reason = FAIL, str(error)
    except (WireError, MalformedError) as error:
        outcome, reason = FAIL, str(error)
    except (LookupError, TypeError, ValueError) as error:
        outcome, reason = FAIL, f"{UNREADABLE}: {error!r}"
    except RefusedError as error:
        outcome, reason = REFUSED, str(error)
    except NotApplicableError as error:
        outcome, reason = NOT_APPLICABLE, str(error)
    finally:
        run.close()
    exchange = () if outcome == PASS else tuple(run.exchange.lines())
    return Result(one, outcome, reason, time.monotonic() - begun_s, exchange)


def chosen(only: str) -> list[Check]:
    """Return the checks that `only` names: ids or groups, with commas; "": all.

    Raises ValueError that says which name is not there.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {each.group for each in CHECKS.values()} | set(CHECKS)
    for name in names:
        if name not in known:
            groups = ", ".join(dict.fromkeys(each.group for each in CHECKS.values()))
            raise ValueError(f"there is no check and no group {name!r}; the groups are {groups}")
    wanted = set(names)
    return [each for each in CHECKS.values() if not wanted or wanted & {each.id, each.group}]


FIRST: Final = "server.answers"
"""The check without which no other is made: is this a server of DCP, and does it let us in?"""


def judge_all(target: Target, checks: Iterable[Check]) -> Iterator[Result]:
    """Make checks one after the other, each in a partition of its own while there are enough.

    The check FIRST comes before all others. If it does not pass, they are not applicable.
    """
    partitions: list[int] = []
    first = CHECKS[FIRST]._replace(does=lambda run: partitions.extend(active_partitions(run)))
    result = judge(first, target, 0)
    yield result
    for number, one in enumerate(each for each in checks if each.id != FIRST):
        if result.outcome == PASS:
            yield judge(one, target, partitions[number % len(partitions)])
        else:
            yield Result(one, NOT_APPLICABLE, f"not tried: {result.reason}", 0.0, ())


def active_partitions(run: Run) -> list[int]:
    """Return the partitions that the server is master of; there has to be one."""
    answer = need_status(run.kv().ask(p.GET_ALL_VB_SEQNOS, extras=struct_pack(">I", 1)))
    if len(answer.value) % _ENTRY_BYTES:
        raise MalformedError(f"{len(answer.value)} bytes are no multiple of {_ENTRY_BYTES}")
    places = range(0, len(answer.value), _ENTRY_BYTES)
    found = [int.from_bytes(answer.value[at : at + 2], "big") for at in places]
    need(bool(found), "no partition is active on this node")
    return found
