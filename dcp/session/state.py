"""The state of one connection, shared by its command groups: what is negotiated and pending."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NamedTuple

from dcp.session.access.auth import Authenticator, LoginQuestion
from dcp.session.access.rights import FULL_RIGHTS, Rights, split_key
from dcp.session.answers.long_requests import LongQueue, LongRequest
from dcp.session.answers.marks import NO_PARTITION, RUN, Mark, Wait, is_change
from dcp.session.faults import FaultTable
from dcp.session.kv.prefix_counts import PrefixCounts
from dcp.session.kv.range_scans import RangeScans
from dcp.session.node_facts import Limits, MapNews, NodeFacts
from dcp.session.replication_port import ArrivalWait, ReplicaSender, ReplicationPort
from dcp.stream.hub import StreamHub
from dcp.stream.producer import Producer
from dcp.wire.frame import Frame, pack_request, pack_response
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import (
    MEMCACHED_TEXTS,
    RefusedError,
    Status,
    UnknownNameError,
    WrongVbucketError,
)
from failover.rules.write_answer import Durability
from vbucket.engine.documents.read_modify_write import Flush
from vbucket.engine.engine import Engine
from vbucket.engine.loading.loads import LoadTicket
from vbucket.engine.partition import Partition, VbState
from vbucket.model.manifest import decode_leb128
from vbucket.store.environment import StoreDamagedError

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of unsent answers above which a session takes no more commands. So a client that does not
read costs this much and one answer."""

CHANGES_BYTES_MAX: Final = 1024 * 1024
"""Bytes of changes that a session writes before others get their turn, if they are larger than what
was received."""

CONTEXT_CHARS_MAX: Final = 300
"""Longest text in an error response and its log line, because it may quote what a client sent."""

FLUSH_PAUSE_NS: Final = 250_000_000
"""How long a flush waits before it checks again whether writes are taken, or loads are done."""

_UNCONFIRMED: Final = "its replicas have not confirmed for a while that this node is its master"
_PARTLY_FLUSHED: Final = "some documents were deleted before; flush again to delete the rest"

NOTES_MAX: Final = 16
"""Most log lines of one batch, so that a client with a thousand errors does not fill the log."""


CLUSTERMAP_CHANGED: Final = 0x01
"""Opcode of a server's request: a newer configuration."""
COLLECTIONS_OF_CLUSTER: Final = (
    "the collections of a cluster are changed over the admin interface: dcpctl collection create"
)


class Negotiated:
    """What HELLO has agreed on with a client. Plain attributes, read on the hot path."""

    __slots__ = (
        "agent",
        "datatypes",
        "has_collections",
        "has_durability",
        "has_fit_meta",
        "has_json",
        "has_mutation_tokens",
        "has_preserve_ttl",
        "has_put_frames",
        "has_xattr",
        "has_xerror",
        "hashes_keys",
    )

    def __init__(self) -> None:
        self.agent = ""
        self.hashes_keys = True
        """Whether keys are hashed here: the client sent neither HELLO nor SELECT_BUCKET."""
        self.has_collections = self.has_mutation_tokens = False
        self.has_preserve_ttl = self.has_xerror = False
        self.has_put_frames = self.has_fit_meta = self.has_durability = self.has_xattr = False
        self.datatypes = self.has_json = 0
        """Masks: the bits JSON and SNAPPY of datatypes, as HELLO granted them; JSON alone."""


class ClientLogin:
    """Who a client is, and what it may do. Plain attributes, read on the hot path."""

    __slots__ = (
        "allows_anonymous",
        "authenticator",
        "exchange",
        "failures",
        "peer_is_loopback",
        "question",
        "request",
        "rights",
        "stale_user",
        "user",
    )

    def __init__(
        self, authenticator: Authenticator, *, peer_is_loopback: bool, takes_anonymous: bool = True
    ) -> None:
        self.authenticator = authenticator
        self.peer_is_loopback = peer_is_loopback
        self.failures = 0
        self.user: str | None = None
        self.stale_user = ""
        """The user who was logged in until it was removed."""
        self.request: Frame | None = None
        """The SASL request whose outcome is not known yet; no command is taken before it is."""
        self.question: LoginQuestion | None = None
        """What the shell has to ask the authenticator; `take_question` hands it over."""
        self.exchange: object | None = None
        self.allows_anonymous = peer_is_loopback and takes_anonymous
        self.rights: Rights | None = FULL_RIGHTS if self.allows_anonymous else None
        """What the client may do; None: it has to log in first."""

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

    def take_question(self) -> LoginQuestion | None:
        """Hand over what the authenticator is to be asked, once. The session forgets the password,
        and waits for `Session.login_checked`.
        """
        question, self.question = self.question, None
        return question


class CurrentRequest:
    """The request under way: what its answer depends on. Plain attributes, read on the hot path."""

    __slots__ = ("durability", "observed", "undo")

    def __init__(self) -> None:
        self.observed: list[Wait] = []
        """What it has shown, if there are marks."""
        self.durability: Durability | None = None
        """Its durability frame."""
        self.undo: Callable[[], None] | None = None
        """Takes back what it has begun, if its answer is replaced."""


class SessionParts(NamedTuple):
    """What all sessions of a node share."""

    engine: Engine
    hub: StreamHub
    facts: NodeFacts
    limits: Limits
    faults: FaultTable
    prefixes: PrefixCounts
    long_queue: LongQueue
    scans: RangeScans | None = None
    """The node's range scans; None: there are no commands for them."""
    replication: ReplicationPort | None = None
    """Where replicas' nodes come in; None: this node is alone."""
    acknowledges_as_master: bool = False
    """Whether reads wait for this node's log only (setting acknowledge)."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        hub: StreamHub,
        facts: NodeFacts,
        limits: Limits,
        *,
        scans: RangeScans | None = None,
        replication: ReplicationPort | None = None,
    ) -> SessionParts:
        """Return them for a node without faults and counts of its own."""
        faults, prefixes = FaultTable(), PrefixCounts()
        return cls(
            engine, hub, facts, limits, faults, prefixes, LongQueue(), scans, replication
        )  # fmt: skip


class Pause:
    """What a session waits for before it takes the next command, if not only for its turn. The
    session is full meanwhile, and the shell resumes it in time.
    """

    __slots__ = ("arrival", "is_for_room", "until_ns")

    def __init__(self) -> None:
        self.is_for_room = False
        """A command that writes waits until `engine.writers_wait` ends; `resume` goes on then."""
        self.until_ns = 0
        """No command is taken before this Unix time: a fault, a flush or a long request waits."""
        self.arrival = ArrivalWait()
        """The wait for a partition that is handed over to this node."""


class Notes:
    """Lines for the log, which the shell writes after each batch."""

    __slots__ = ("left_out", "lines")

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []
        """(event, fields); at most NOTES_MAX."""
        self.left_out = 0
        """How many more there would be."""

    def add(self, event: str, **fields: object) -> None:
        """Leave a line for the log, or count it if there are enough."""
        if len(self.lines) < NOTES_MAX:
            self.lines.append((event, fields))
        else:
            self.left_out += 1


class SessionState:
    """One connection's state. Plain attributes, read on the hot path."""

    __slots__ = (
        "answers",
        "awaited",
        "buffer",
        "close_reason",
        "current",
        "engine",
        "feed",
        "first_change",
        "held_bytes",
        "hello",
        "is_full",
        "loads",
        "login",
        "map_news",
        "marks",
        "notes",
        "pause",
        "schedule",
        "sender",
        "shared",
        "taken_bytes",
        "unfinished",
        "unread_bytes",
        "wait_group",
        "work",
    )

    def __init__(self, shared: SessionParts, login: ClientLogin) -> None:
        self.shared = shared
        self.engine = shared.engine
        self.login = login
        self.buffer = b""
        """Bytes that were received and are not handled yet."""
        self.held_bytes = self.taken_bytes = 0
        """Received bytes that the session keeps (incomplete packets, and packets that wait); bytes
        that were handled since the connection began."""
        self._begin_answers()
        self.unread_bytes = 0
        """Bytes in `answers` that count against ANSWER_BYTES_MAX."""
        self.is_full = False
        """Whether no command is taken until the shell calls `resume`."""
        self.pause = Pause()
        self.close_reason = ""
        """Why the connection closes after what has been answered; "": it does not."""
        self.notes = Notes()
        self.hello = Negotiated()
        self.map_news = MapNews(shared.facts)
        self.unfinished: Flush | LongRequest | None = None
        """A request that goes on in steps; no other command is taken before it is done."""
        self.work = 0.0
        """How much of a turn of the event loop the requests since `resume` have taken; 1: all."""
        self.sender: Producer | ReplicaSender | None = None
        """What pumps messages into the connection, if anything does: a producer or a feed."""
        self.feed: ReplicaSender | None = None
        """What sends to a replica's node."""
        self.schedule = _nothing_to_schedule
        """Rings the shell, which only notes it, and pumps the sender later."""

    @property
    def producer(self) -> Producer | None:
        """What sends streams to a DCP client, if this is one."""
        return self.sender if isinstance(self.sender, Producer) else None

    @property
    def is_closing(self) -> bool:
        """Whether the connection closes after what has been answered, and takes no more."""
        return bool(self.close_reason)

    def _begin_answers(self) -> None:
        """Begin with no answers, and nothing that they wait for."""
        self.answers: list[bytes] = []
        """Responses in order. `dcp.session.answers.held_answers` says when they may leave: it has
        the rules of the next three."""
        self.loads: list[tuple[int, LoadTicket]] = []  # places of answers, and what these await
        self.wait_group, self.first_change = 0, -1
        self.awaited: dict[int, int] = {}
        self.marks: list[Mark] | None = None if self.shared.replication is None else []
        """What each single answer waits for; None on a node alone (`dcp.session.answers.marks`)."""
        self.current = CurrentRequest()

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
                datatype=self.hello.has_json if is_json else 0,
            )
        )

    def refuse(self, opcode: int, opaque: int, status: int, context: str) -> None:
        """Answer with an error, and leave a line for the log."""
        context = context[:CONTEXT_CHARS_MAX]
        self.notes.add("refused", opcode=opcode, status=status, reason=context)
        self.answer_json(opcode, opaque, status, self.error_body(context, status))

    def answer_error(
        self, opcode: int, opaque: int, vb_id: int, error: RefusedError | StoreDamagedError
    ) -> None:
        """Answer a request whose handler raised."""
        if isinstance(error, StoreDamagedError):
            self.notes.add("damaged data", opcode=opcode, vb_id=error.vb_id, reason=str(error))
            body = self.error_body(f"the stored data is damaged: {error}", Status.EINTERNAL)
            self.send(pack_response(opcode, Status.EINTERNAL, opaque=opaque, value=body))
        elif isinstance(error, WrongVbucketError) and self.hello.hashes_keys:
            vb_id = vb_id if error.vb_id is None else error.vb_id
            self.refuse(opcode, opaque, error.status, self.place_text(vb_id))
        elif isinstance(error, WrongVbucketError):
            self._note_not_my_vbucket(opcode, vb_id)
            self.answer_json(opcode, opaque, error.status, self.map_news.with_refusal())
        elif isinstance(error, UnknownNameError):
            self.observes_manifest()
            told: dict[str, object] = {"manifest_uid": f"{self.engine.keyspace.manifest.uid:x}"}
            if self.hello.has_xerror and str(error):
                told["error"] = {"context": str(error)[:CONTEXT_CHARS_MAX]}
            body = json.dumps(told, separators=(",", ":")).encode()
            self.answer_json(opcode, opaque, error.status, body)
        else:
            self.refuse(opcode, opaque, error.status, str(error))

    def deny(self, opcode: int, opaque: int, why: str) -> None:
        """Answer that the client may not do this. `denial` has left the line for the log."""
        self.answer_json(opcode, opaque, Status.EACCESS, self.error_body(why))

    def answer_json(self, opcode: int, opaque: int, status: int, body: bytes) -> None:
        """Answer with a JSON document, or with nothing where `body` is empty."""
        datatype = self.hello.has_json if body else 0
        self.send(pack_response(opcode, status, opaque=opaque, value=body, datatype=datatype))

    def denial(self, opcode: int, wire_key: bytes) -> str:
        """Return why the client may not do this; "": it may. A denial leaves a log line."""
        assert self.login.rights is not None, "asked before the login"
        collection, key = split_key(wire_key, has_collections=self.hello.has_collections)
        if collection is None:
            collection = self.collection_named_by(wire_key)
        denial = self.login.rights.denial(opcode, collection, key)
        if denial is None:
            return ""
        name = Opcode(opcode).name
        user = self.login.user or ""
        self.notes.add("denied", command=name, user=user, role=str(denial.role), reason=denial.why)
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

    def send(self, packet: bytes) -> None:
        """Add a response, and count it against ANSWER_BYTES_MAX."""
        self.answers.append(packet)
        self.unread_bytes += len(packet)
        if self.unread_bytes > ANSWER_BYTES_MAX:
            self.is_full = True

    def _note_not_my_vbucket(self, opcode: int, vb_id: int) -> None:
        """Leave a line for the log: this partition does not take the command here."""
        parts = self.engine.partitions
        why = f"it is {parts[vb_id].state.name.lower()}" if vb_id < len(parts) else "no such one"
        self.notes.add(
            "refused",
            opcode=opcode,
            status=Status.NOT_MY_VBUCKET,
            reason=f"partition {vb_id}: {why}",
        )

    def error_body(self, context: str, status: int = Status.EACCESS) -> bytes:
        """Return the body of an error response: JSON with XERROR, memcached's text for its clients,
        and nothing for others.
        """
        return error_body(context, status, self.hello.has_xerror, self.hello.hashes_keys)

    def step_flush(self, now_ns: int) -> bool:
        """Take the next step of the flush; return whether it was the last one. Until then the
        session is full, and each `resume` takes a step.

        Raises StoreDamagedError, and RefusedError if writes are refused now. The flush has ended
        then, and what it deleted stays deleted.
        """
        flush, engine = self.unfinished, self.engine
        assert isinstance(flush, Flush), "a flush is under way"
        if engine.write_refusal:
            self.unfinished = None
            raise RefusedError(Status.ETMPFAIL, f"{engine.write_refusal}; {_PARTLY_FLUSHED}")
        try:
            is_done = not engine.writers_wait and flush.step()
        except StoreDamagedError:
            self.unfinished = None
            raise
        except RefusedError as error:
            self.unfinished = None
            raise RefusedError(error.status, f"{error}; {_PARTLY_FLUSHED}") from error
        if not is_done:
            if engine.writers_wait or flush.is_waiting:
                self.pause.until_ns = now_ns + FLUSH_PAUSE_NS
            self.is_full = True
            return False
        self.unfinished = None
        for part in engine.partitions:
            self.observes(part.vb_id)
        return True

    @property
    def has_steps(self) -> bool:
        """Whether a request goes on in steps, and has no answer yet."""
        return self.unfinished is not None

    def spend(self, part: float) -> None:
        """Count work of a request. At 1, others get their turn before this session goes on."""
        self.work += part
        if self.work >= 1:
            self.is_full = True

    def spend_changes(self, first_entry: int) -> None:
        """Count the work of the changes from this place on, which may be larger than what was
        received: an APPEND of a byte writes the whole document.
        """
        for entry in self.engine.keyspace.pending[first_entry:]:
            self.spend(len(entry) / CHANGES_BYTES_MAX)

    def close(self, reason: str) -> None:
        """Close the connection after what has been answered."""
        assert reason, "a connection closes with a reason"
        self.close_reason = reason

    def pushed_map(self) -> bytes:
        """Return the packet that tells the client the newest map, which counts as told then; b"":
        it has not asked for that, knows it, or has no bucket.
        """
        news = None if self.map_news.bucket is None else self.map_news.push()
        if news is None:
            return b""
        return pack_request(
            CLUSTERMAP_CHANGED,
            extras=news.version,
            key=(self.map_news.bucket or "").encode(),
            value=news.body,
            datatype=self.hello.has_json if news.body else 0,
            magic=Magic.SERVER_REQUEST,
        )

    def observes_manifest(self) -> None:
        """Let the answers wait until the collections manifest, which they tell of, is committed."""
        self._await_sync(self.engine.keyspace.manifest_group)

    def elsewhere(self, part: Partition) -> RefusedError:
        """Return the refusal of a command that needs an active partition. An answer that tells the
        partition's state waits until that is in this node's log.
        """
        if part.state == VbState.FENCED:
            return RefusedError(Status.ETMPFAIL, self.fence_text(part))
        self._await_sync(part.state_group)
        return WrongVbucketError(part.vb_id)

    def fence_text(self, part: Partition) -> str:
        """Return why a fenced partition does not answer."""
        replication = self.shared.replication
        why = "" if replication is None else replication.why_fenced(part.vb_id)
        return f"partition {part.vb_id}: {why or _UNCONFIRMED}; try again"

    def place_text(self, vb_id: int) -> str:
        """Return where a partition is, for clients that know none and take no map. The partition
        may be any number that a client wrote into a header.
        """
        if vb_id >= self.engine.num_vbuckets:
            return f"there is no partition {vb_id}: the last one is {self.engine.num_vbuckets - 1}"
        address = self.shared.facts.address_of(vb_id)
        if address:
            return f"this key is on another node of the cluster: {address}"
        return "no node of the cluster serves this key now; try again"

    def check_is_current(self, part: Partition) -> None:
        """Raise RefusedError if what this node would tell of the partition may be out of date."""
        if part.state == VbState.FENCED:
            raise RefusedError(Status.ETMPFAIL, self.fence_text(part))
        if part.is_unheard:
            raise RefusedError(
                Status.ETMPFAIL,
                f"partition {part.vb_id}: this replica has not heard from a master for a while;"
                " try again",
            )

    def observes(self, vb_id: int) -> None:
        """Let the answers wait until the partition's changes, which they tell of, are committed.

        With `acknowledge=master` reads wait until changes are in this node's log.
        """
        self.observes_group(vb_id, self.engine.partitions[vb_id].last_group)

    def observes_version(self, part: Partition, key: bytes) -> None:
        """Let the answers wait until the newest version of a key, which they tell of, is committed
        (or that there is none). Later changes of the partition do not matter.
        """
        self.observes_group(part.vb_id, self.engine.keyspace.group_of_version(part, key))

    def observes_history(self, vb_id: int) -> None:
        """Let the answers wait until the partition's changes and its newest version are committed.
        A new version changes no document, but nobody may see it before.
        """
        part = self.engine.partitions[vb_id]
        self._await(vb_id, max(part.last_group, part.branch_group))

    def observes_newest_version(self, vb_id: int) -> None:
        """Let the answers wait until the partition's newest version is committed, but not for its
        changes.
        """
        self._await(vb_id, self.engine.partitions[vb_id].branch_group)

    def observes_group(self, vb_id: int, group: int) -> None:
        """Let the answers wait until a group of a partition, which they tell of, is committed."""
        if self.shared.acknowledges_as_master:
            self._await_sync(group, vb_id)
        else:
            self._await(vb_id, group)

    def _await_sync(self, group: int, vb_id: int = NO_PARTITION) -> None:
        if group > self.engine.commits.synced_group:
            self.wait_group = max(self.wait_group, group)
            if self.marks is not None:
                self.current.observed.append(Wait(vb_id, group, is_for_commit=False))

    def _await(self, vb_id: int, group: int) -> None:
        if group > self.engine.commits.committed_group and not self.engine.commits.is_committed(
            vb_id, group
        ):
            self.wait_group = max(self.wait_group, group)
            self.awaited[vb_id] = max(group, self.awaited.get(vb_id, 0))
            if self.marks is not None:
                self.current.observed.append(Wait(vb_id, group, is_for_commit=True))

    # -- marks ---------------------------------------------------------------------------------

    def mark(
        self,
        opcode: int,
        opaque: int,
        first_answer: int,
        first_entry: int,
        *,
        is_read: bool | None = None,
    ) -> Mark | None:
        """Leave a mark for the request that was just handled, if its answer waits. It added the
        answers and the entries from these places on. None: the answer does not wait.

        `is_read` None: the opcode and the status of the answer tell whether it changed anything.
        """
        assert self.marks is not None, "a node alone has no marks"
        current = self.current
        observed, undo, current.undo = tuple(current.observed), current.undo, None
        entries = len(self.engine.keyspace.pending) - first_entry
        if observed:
            current.observed.clear()
        if not (entries or observed) or self.has_steps:
            return None
        answers = self.answers[first_answer:]
        if is_read is None:
            is_read = not is_change(opcode, entries, answers[0] if answers else b"")
        mark = Mark(
            opcode, opaque, first_answer, len(answers), first_entry, entries, is_read=is_read,
            observed=observed, durability=current.durability, undo=undo,
        )  # fmt: skip
        self.marks.append(mark)
        return mark

    def mark_read(self, opcode: int, opaque: int) -> None:
        """Leave a mark for a read whose answer comes next, if it waits."""
        if self.current.observed:
            assert self.marks is not None, "only marks need what was observed"
            self.marks.append(
                Mark(opcode, opaque, len(self.answers), 1, 0, 0, is_read=True,
                     observed=tuple(self.current.observed))
            )  # fmt: skip
            self.current.observed.clear()

    def mark_run(self, first_answer: int) -> None:
        """Leave a mark for a run of changes, each with one answer and one entry."""
        assert self.marks is not None, "a node alone has no marks"
        answers = len(self.answers) - first_answer
        first_entry = len(self.engine.keyspace.pending) - answers
        self.marks.append(Mark(RUN, 0, first_answer, answers, first_entry, answers, is_read=False))


def error_body(context: str, status: int, has_xerror: bool, hashes_keys: bool) -> bytes:
    """See `SessionState.error_body`."""
    if has_xerror:
        return json.dumps({"error": {"context": context}}).encode()
    return MEMCACHED_TEXTS.get(status, context.encode()) if hashes_keys else b""


def _nothing_to_schedule() -> None:
    """Do nothing: no shell has connected itself."""
