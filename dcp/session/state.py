"""What a connection has negotiated and what it has to say. Shared by its command groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from dcp.session.auth import Authenticator
from dcp.session.faults import FaultTable
from dcp.session.range_scans import RangeScans
from dcp.session.rights import FULL_RIGHTS, Rights, split_key
from dcp.stream.hub import StreamHub
from dcp.stream.producer import Producer
from dcp.wire.frame import MAX_VALUE_BYTES, Frame, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.engine.engine import Engine
from vbucket.engine.read_modify_write import Flush
from vbucket.model.manifest import decode_leb128
from vbucket.store.environment import StoreDamagedError

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""What may be waiting to be sent before a session stops to take commands: a client that asks and
does not read costs no more than this and one answer."""

CONTEXT_CHARS_MAX: Final = 300
"""Longest text in an error response and its log line: what a client sent may stand in it."""

FLUSH_PAUSE_NS: Final = 250_000_000
"""How long a flush waits before it looks again whether writes are taken."""

_PARTLY_FLUSHED: Final = "some documents were deleted before; flush again to delete the rest"

NOTES_MAX: Final = 16
"""Log lines that one batch may leave: a client that errs a thousand times need not fill the log."""


BODY_BYTES_MAX_BEFORE_LOGIN: Final = 64 * 1024
"""Largest body of a stranger: logging in needs far less, and anybody can be one."""


class NodeFacts(Protocol):
    """What sessions tell about the node they run in."""

    version: str

    def bucket_config(self) -> bytes:
        """Return the bucket's cluster configuration as JSON."""

    def global_config(self) -> bytes:
        """Return the node's cluster configuration without a bucket, as JSON."""

    def config_version(self) -> tuple[int, int]:
        """Return (revEpoch, rev) of the cluster configuration."""

    def stats(self, group: bytes) -> list[tuple[str, str]] | None:
        """Return the statistics of a group, None for an unknown group."""


class Limits(NamedTuple):
    """Limits of one session."""

    value_bytes_max: int = MAX_VALUE_BYTES
    streams_max: int = 1024
    login_body_bytes_max: int = BODY_BYTES_MAX_BEFORE_LOGIN
    login_failures_max: int = 5
    """Wrong logins after which a connection is closed."""


class FlushAnswers(NamedTuple):
    """How a flush is answered once it ends."""

    done: bytes
    """Follows the last step; b"" where the client wants no answer."""
    damaged: Callable[[StoreDamagedError], None]
    """Called instead where a step meets damaged data. What was deleted by then stays deleted."""
    refused: Callable[[str], None]
    """Called instead where writes are refused meanwhile, with the reason. The same holds."""


class SessionState:
    """One connection's state. Plain attributes, read on the hot path."""

    __slots__ = (
        "agent",
        "allows_anonymous",
        "answers",
        "authenticator",
        "bucket",
        "buffer",
        "close_reason",
        "engine",
        "exchange",
        "facts",
        "faults",
        "flush",
        "flush_answers",
        "has_collections",
        "has_fit_meta",
        "has_json",
        "has_mutation_tokens",
        "has_preserve_ttl",
        "has_put_frames",
        "has_xerror",
        "hashes_keys",
        "held_bytes",
        "held_until_ns",
        "hub",
        "is_closing",
        "is_full",
        "limits",
        "login",
        "login_failures",
        "notes",
        "notes_left_out",
        "peer_is_loopback",
        "producer",
        "rights",
        "scans",
        "schedule",
        "stale_user",
        "taken_bytes",
        "unread_bytes",
        "user",
        "wait_group",
        "waits_for_room",
    )

    def __init__(
        self,
        *,
        engine: Engine,
        hub: StreamHub,
        facts: NodeFacts,
        authenticator: Authenticator,
        peer_is_loopback: bool,
        limits: Limits,
        takes_anonymous: bool = True,
        faults: FaultTable | None = None,
        scans: RangeScans | None = None,
    ) -> None:
        self.engine = engine
        self.hub = hub
        self.facts = facts
        self.authenticator = authenticator
        self.peer_is_loopback = peer_is_loopback
        self.limits = limits
        self.faults = FaultTable() if faults is None else faults
        self.scans = scans
        """The node's range scans; None: this session has no such commands."""
        self.buffer = b""
        """What was received and not yet consumed."""
        self.held_bytes = 0
        """All that the session keeps of what was received: an incomplete packet, or packets that
        wait while the session is full."""
        self.taken_bytes = 0
        """How much of what was received has been worked through, since the connection began."""
        self.answers: list[bytes] = []
        """Responses in order; they may leave when `wait_group` is committed."""
        self.wait_group = 0
        self.unread_bytes = 0
        """Bytes among `answers` that a request can ask for without sending as many itself."""
        self.is_full = False
        """Stop taking commands until the answers are gone."""
        self.waits_for_room = False
        """A command that writes waits at the head of the buffer until `engine.writers_wait` ends.
        The shell calls `resume` then."""
        self.held_until_ns = 0
        """No command is taken before this Unix time: a fault asked for a delay."""
        self.is_closing = False
        self.close_reason = ""
        self.notes: list[tuple[str, dict[str, object]]] = []
        """What the shell should log: (event, fields)."""
        self.notes_left_out = 0
        self.user: str | None = None
        self.stale_user = ""
        """Who was logged in until the user was removed."""
        self.login_failures = 0
        self.login: Frame | None = None
        """The SASL request whose outcome is not known yet; no command is taken before it is."""
        self.exchange: object | None = None
        self.allows_anonymous = peer_is_loopback and takes_anonymous
        self.rights: Rights | None = FULL_RIGHTS if self.allows_anonymous else None
        """What the client may do; None: nothing before it has logged in."""
        self.agent = ""
        self.bucket: str | None = None
        self.hashes_keys = True
        """The client knows nothing of partitions (neither HELLO nor SELECT_BUCKET came)."""
        self.has_collections = self.has_mutation_tokens = False
        self.has_preserve_ttl = self.has_xerror = False
        self.has_put_frames = self.has_fit_meta = False
        self.has_json = 0
        """1 where the datatype bit JSON was negotiated (HELLO 0x0b), as a mask of that bit."""
        self.producer: Producer | None = None
        self.schedule = _nothing_to_schedule
        self.flush: Flush | None = None
        """A flush under way; no other command is taken before it is done."""
        self.flush_answers = _NOT_FLUSHING

    def answer(
        self,
        request: Frame,
        status: int = Status.OK,
        *,
        extras: bytes = b"",
        key: bytes = b"",
        value: bytes = b"",
        is_json: bool = False,
    ) -> None:
        """Answer a request; `is_json` says that the value is a JSON document."""
        self.send(
            pack_response(
                request.opcode,
                status,
                opaque=request.opaque,
                extras=extras,
                key=key,
                value=value,
                datatype=self.has_json if is_json else 0,
            )
        )

    def refuse(self, request: Frame, status: int, context: str) -> None:
        """Answer with an error; the context goes along where the client understands it."""
        context = context[:CONTEXT_CHARS_MAX]
        self.note("refused", opcode=request.opcode, status=status, reason=context)
        body = self.error_body(context)
        self.answer(request, status, value=body, is_json=bool(body))

    def denial(self, opcode: int, wire_key: bytes) -> str:
        """Return why the client may not do this, "" if it may; what is refused is noted."""
        assert self.rights is not None, "asked before the login"
        collection, key = split_key(wire_key, has_collections=self.has_collections)
        if collection is None:
            collection = self.collection_named_by(wire_key)
        denial = self.rights.denial(opcode, collection, key)
        if denial is None:
            return ""
        name = Opcode(opcode).name
        user = self.user or ""
        self.note("denied", command=name, user=user, role=str(denial.role), reason=denial.why)
        return (
            f"user {user!r} may not {name}: {denial.why}; "
            f"an admin grants it: dcpctl user grant {user} {denial.role}"
        )[:CONTEXT_CHARS_MAX]

    def collection_named_by(self, wire_key: bytes) -> str | None:
        """Return "scope.collection" of a key that carries its id, None where there is none."""
        decoded = decode_leb128(wire_key)
        manifest = self.engine.keyspace.manifest
        if decoded is None or decoded[0] not in manifest.collections:
            return None
        return manifest.path_of(decoded[0])

    def rights_changed(self, rights: Rights | None) -> None:
        """Take note of what the logged-in user may do from now on; None: the user is gone."""
        assert self.user is not None, "nobody is logged in"
        self.rights = rights
        if rights is None:
            self.stale_user, self.user = self.user, None

    def logged_in(self, user: str | None, rights: Rights) -> None:
        """Take note of a login; None: it failed, and the client is nobody again."""
        self.user = user
        self.stale_user = ""
        self.rights = rights if user is not None or self.allows_anonymous else None

    def send(self, packet: bytes) -> None:
        """Send a response that may be longer than its request, and stop when there is enough."""
        self.answers.append(packet)
        self.unread_bytes += len(packet)
        if self.unread_bytes > ANSWER_BYTES_MAX:
            self.is_full = True

    def note(self, event: str, **fields: object) -> None:
        """Leave a line for the log; at most NOTES_MAX per batch are kept."""
        if len(self.notes) < NOTES_MAX:
            self.notes.append((event, fields))
        else:
            self.notes_left_out += 1

    def note_not_my_vbucket(self, opcode: int, vb_id: int) -> None:
        """Leave a line for the log: a partition does not take this command here."""
        parts = self.engine.partitions
        why = f"it is {parts[vb_id].state.name.lower()}" if vb_id < len(parts) else "no such one"
        self.note(
            "refused", opcode=opcode, status=Status.NOT_MY_VBUCKET, reason=f"vb {vb_id}: {why}"
        )

    def error_body(self, context: str) -> bytes:
        """Return the body of an error response, empty for clients without XERROR."""
        if not self.has_xerror:
            return b""
        return json.dumps({"error": {"context": context}}).encode()

    def answer_damage(self, opcode: int, opaque: int, error: StoreDamagedError) -> None:
        """Answer a request whose data cannot be read; nothing more is changed by it."""
        self.note("damaged data", opcode=opcode, reason=str(error))
        body = self.error_body(f"the stored data is damaged: {error}")
        self.send(pack_response(opcode, Status.EINTERNAL, opaque=opaque, value=body))

    def begin_flush(self, flush: Flush, answers: FlushAnswers) -> None:
        """Delete all documents in steps, one per `resume`."""
        self.flush = flush
        self.flush_answers = answers
        self.continue_flush(0)

    def continue_flush(self, now_ns: int) -> None:
        """Take the next step; until the last one is done the session is full."""
        assert self.flush is not None
        engine = self.engine
        if engine.write_refusal:
            self.flush = None
            self.flush_answers.refused(f"{engine.write_refusal}; {_PARTLY_FLUSHED}")
            return
        if engine.writers_wait:
            self.held_until_ns = now_ns + FLUSH_PAUSE_NS
            self.is_full = True
            return
        try:
            if not self.flush.step():
                self.is_full = True
                return
        except StoreDamagedError as error:
            self.flush = None
            self.flush_answers.damaged(error)
            return
        self.flush = None
        last_group = max(part.last_group for part in engine.partitions)
        if last_group > engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, last_group)
        if self.flush_answers.done:
            self.answers.append(self.flush_answers.done)

    def close(self, reason: str) -> None:
        """Close the connection after what has been answered."""
        self.is_closing = True
        self.close_reason = reason

    def manifest_uid_body(self) -> bytes:
        """Return the body of an answer that a collection or scope is not known."""
        return b'{"manifest_uid":"%x"}' % self.engine.keyspace.manifest.uid

    def observes_manifest(self) -> None:
        """The next answers tell of the collections manifest: they wait until it is committed."""
        if self.engine.keyspace.manifest_group > self.engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, self.engine.keyspace.manifest_group)

    def observes(self, vb_id: int) -> None:
        """The next answers tell of this partition: they wait until what they tell is committed."""
        last_group = self.engine.partitions[vb_id].last_group
        if last_group > self.engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, last_group)

    def observes_history(self, vb_id: int) -> None:
        """The same for answers that tell of the partition's versions. A new version changes no
        document, but nobody may know of it before it is committed.
        """
        self.observes(vb_id)
        branch_group = self.engine.partitions[vb_id].branch_group
        if branch_group > self.engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, branch_group)


def _not_flushing(_why: object) -> None:
    """No flush is under way."""


_NOT_FLUSHING: Final = FlushAnswers(b"", _not_flushing, _not_flushing)


def _nothing_to_schedule() -> None:
    """A session without a producer has nothing to pump."""
