"""The state of one connection, shared by its command groups: what is negotiated and pending."""

from __future__ import annotations

import json
from typing import Final, NamedTuple, Protocol

from dcp.session.auth import Authenticator, LoginQuestion
from dcp.session.faults import FaultTable
from dcp.session.range_scans import RangeScans
from dcp.session.rights import FULL_RIGHTS, Rights, split_key
from dcp.stream.hub import StreamHub
from dcp.stream.producer import BACKLOGS_MAX, Producer
from dcp.wire.frame import MAX_VALUE_BYTES, Frame, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, UnknownNameError, WrongVbucketError
from vbucket.engine.engine import Engine
from vbucket.engine.read_modify_write import Flush
from vbucket.model.manifest import decode_leb128
from vbucket.store.environment import StoreDamagedError

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of unsent answers above which a session takes no more commands. So a client that does not
read costs this much and one answer."""

CONTEXT_CHARS_MAX: Final = 300
"""Longest text in an error response and its log line, because it may quote what a client sent."""

FLUSH_PAUSE_NS: Final = 250_000_000
"""How long a flush waits before it checks again whether writes are taken."""

_PARTLY_FLUSHED: Final = "some documents were deleted before; flush again to delete the rest"

NOTES_MAX: Final = 16
"""Most log lines of one batch, so that a client with a thousand errors does not fill the log."""


BODY_BYTES_MAX_BEFORE_LOGIN: Final = 64 * 1024
"""Largest body before the login, which needs far less. Anybody can send so much."""


class NodeFacts(Protocol):
    """What sessions tell about their node."""

    version: str

    def bucket_config(self) -> bytes:
        """Return the bucket's cluster configuration as JSON."""

    def global_config(self) -> bytes:
        """Return the node's cluster configuration without a bucket, as JSON."""

    def config_version(self) -> tuple[int, int]:
        """Return (revEpoch, rev) of the cluster configuration."""

    def stats(self, group: bytes) -> list[tuple[str, str]] | None:
        """Return the statistics of a group; None: it is unknown."""


class Limits(NamedTuple):
    """Limits of one session."""

    value_bytes_max: int = MAX_VALUE_BYTES
    streams_max: int = 1024
    backlogs_max: int = BACKLOGS_MAX
    login_body_bytes_max: int = BODY_BYTES_MAX_BEFORE_LOGIN
    login_failures_max: int = 5
    """Failed logins after which a connection is closed."""


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
        "has_collections",
        "has_fit_meta",
        "has_json",
        "has_mutation_tokens",
        "has_preserve_ttl",
        "has_put_frames",
        "has_xattr",
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
        "login_question",
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
        """The node's range scans; None: this session has no commands for them."""
        self.buffer = b""
        """Bytes that were received and are not handled yet."""
        self.held_bytes = 0
        """Received bytes that the session keeps: incomplete packets, and packets that wait."""
        self.taken_bytes = 0
        """Received bytes that were handled since the connection began."""
        self.answers: list[bytes] = []
        """Responses in order; they may leave when `wait_group` is committed."""
        self.wait_group = 0
        self.unread_bytes = 0
        """Bytes in `answers` that count against ANSWER_BYTES_MAX."""
        self.is_full = False
        """Whether no command is taken until the shell calls `resume`."""
        self.waits_for_room = False
        """A command that writes waits until `engine.writers_wait` ends; `resume` goes on then."""
        self.held_until_ns = 0
        """No command is taken before this Unix time: a fault or a flush waits."""
        self.is_closing = False
        self.close_reason = ""
        self.notes: list[tuple[str, dict[str, object]]] = []
        """Log lines for the shell: (event, fields)."""
        self.notes_left_out = 0
        self.user: str | None = None
        self.stale_user = ""
        """The user who was logged in until it was removed."""
        self.login_failures = 0
        self.login: Frame | None = None
        """The SASL request whose outcome is not known yet; no command is taken before it is."""
        self.login_question: LoginQuestion | None = None
        """What the shell has to ask the authenticator; `take_login_question` hands it over."""
        self.exchange: object | None = None
        self.allows_anonymous = peer_is_loopback and takes_anonymous
        self.rights: Rights | None = FULL_RIGHTS if self.allows_anonymous else None
        """What the client may do; None: it has to log in first."""
        self.agent = ""
        self.bucket: str | None = None
        self.hashes_keys = True
        """Whether keys are hashed here: the client sent neither HELLO nor SELECT_BUCKET."""
        self.has_collections = self.has_mutation_tokens = False
        self.has_preserve_ttl = self.has_xerror = False
        self.has_put_frames = self.has_fit_meta = self.has_xattr = False
        self.has_json = 0
        """A mask: 1 if the datatype bit JSON was negotiated (HELLO 0x0b), else 0."""
        self.producer: Producer | None = None
        self.schedule = _nothing_to_schedule
        """Rings the shell, which only notes it, and pumps the producer later."""
        self.flush: Flush | None = None
        """A flush under way; no other command is taken before it is done."""

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
        """Answer a request; `is_json`: the value is a JSON document."""
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

    def refuse(self, opcode: int, opaque: int, status: int, context: str) -> None:
        """Answer with an error, and leave a line for the log."""
        context = context[:CONTEXT_CHARS_MAX]
        self.note("refused", opcode=opcode, status=status, reason=context)
        self.answer_json(opcode, opaque, status, self.error_body(context))

    def answer_error(
        self, opcode: int, opaque: int, vb_id: int, error: RefusedError | StoreDamagedError
    ) -> None:
        """Answer a request whose handler raised."""
        if isinstance(error, StoreDamagedError):
            self.note("damaged data", opcode=opcode, reason=str(error))
            body = self.error_body(f"the stored data is damaged: {error}")
            self.send(pack_response(opcode, Status.EINTERNAL, opaque=opaque, value=body))
        elif isinstance(error, WrongVbucketError):
            self._note_not_my_vbucket(opcode, vb_id)
            self.answer_json(opcode, opaque, error.status, self.facts.bucket_config())
        elif isinstance(error, UnknownNameError):
            self.observes_manifest()
            body = b'{"manifest_uid":"%x"}' % self.engine.keyspace.manifest.uid
            self.answer_json(opcode, opaque, error.status, body)
        else:
            self.refuse(opcode, opaque, error.status, str(error))

    def deny(self, opcode: int, opaque: int, why: str) -> None:
        """Answer that the client may not do this. `denial` has left the line for the log."""
        self.answer_json(opcode, opaque, Status.EACCESS, self.error_body(why))

    def answer_json(self, opcode: int, opaque: int, status: int, body: bytes) -> None:
        """Answer with a JSON document, or with nothing where `body` is empty."""
        datatype = self.has_json if body else 0
        self.send(pack_response(opcode, status, opaque=opaque, value=body, datatype=datatype))

    def denial(self, opcode: int, wire_key: bytes) -> str:
        """Return why the client may not do this; "": it may. A denial leaves a log line."""
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
        """Return "scope.collection" of a key with a collection id; None: there is none."""
        decoded = decode_leb128(wire_key)
        manifest = self.engine.keyspace.manifest
        if decoded is None or decoded[0] not in manifest.collections:
            return None
        return manifest.path_of(decoded[0])

    def rights_changed(self, rights: Rights | None) -> None:
        """Set what the logged-in user may do from now on; None: the user was removed."""
        assert self.user is not None, "nobody is logged in"
        self.rights = rights
        if rights is None:
            self.stale_user, self.user = self.user, None

    def logged_in(self, user: str | None, rights: Rights) -> None:
        """Set who is logged in; None: the login failed, and nobody is logged in any more."""
        self.user = user
        self.stale_user = ""
        self.rights = rights if user is not None or self.allows_anonymous else None

    def send(self, packet: bytes) -> None:
        """Add a response, and count it against ANSWER_BYTES_MAX."""
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

    def _note_not_my_vbucket(self, opcode: int, vb_id: int) -> None:
        """Leave a line for the log: this partition does not take the command here."""
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

    def step_flush(self, now_ns: int) -> bool:
        """Take the next step of the flush; return whether it was the last one. Until then the
        session is full, and each `resume` takes a step.

        Raises StoreDamagedError, and RefusedError if writes are refused now. The flush has ended
        then, and what it deleted stays deleted.
        """
        flush, engine = self.flush, self.engine
        assert flush is not None
        if engine.write_refusal:
            self.flush = None
            raise RefusedError(Status.ETMPFAIL, f"{engine.write_refusal}; {_PARTLY_FLUSHED}")
        if engine.writers_wait:
            self.held_until_ns = now_ns + FLUSH_PAUSE_NS
            self.is_full = True
            return False
        try:
            is_done = flush.step()
        except StoreDamagedError:
            self.flush = None
            raise
        if not is_done:
            self.is_full = True
            return False
        self.flush = None
        last_group = max(part.last_group for part in engine.partitions)
        if last_group > engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, last_group)
        return True

    def take_login_question(self) -> LoginQuestion | None:
        """Hand over what the authenticator is to be asked, once. The session forgets the password,
        and waits for `Session.login_checked`.
        """
        question, self.login_question = self.login_question, None
        return question

    def close(self, reason: str) -> None:
        """Close the connection after what has been answered."""
        self.is_closing = True
        self.close_reason = reason

    def observes_manifest(self) -> None:
        """Let the answers wait until the collections manifest, which they tell of, is committed."""
        if self.engine.keyspace.manifest_group > self.engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, self.engine.keyspace.manifest_group)

    def observes(self, vb_id: int) -> None:
        """Let the answers wait until the partition's changes, which they tell of, are committed."""
        last_group = self.engine.partitions[vb_id].last_group
        if last_group > self.engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, last_group)

    def observes_history(self, vb_id: int) -> None:
        """Let the answers wait until the partition's changes and its newest version are committed.
        A new version changes no document, but nobody may see it before.
        """
        self.observes(vb_id)
        branch_group = self.engine.partitions[vb_id].branch_group
        if branch_group > self.engine.keyspace.committed_group:
            self.wait_group = max(self.wait_group, branch_group)


def _nothing_to_schedule() -> None:
    """Do nothing: no shell has connected itself."""
