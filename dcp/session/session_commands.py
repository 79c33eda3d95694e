"""Commands about the connection or the node: HELLO, SASL, configuration, statistics, history."""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct
from typing import Final

from dcp.session.access.auth import AuthStep, LoginQuestion
from dcp.session.access.rights import FULL_RIGHTS, Role
from dcp.session.node_facts import CONFIG_VERSION
from dcp.session.request_frames import refuse_stray
from dcp.session.state import SessionState
from dcp.wire.feature import GRANTED, GRANTED_IN_CLUSTERS, MAP_PUSHES, Feature
from dcp.wire.frame import Frame
from dcp.wire.message import (
    OBSERVE_CURRENT,
    OBSERVE_OLD,
    PUT_FRAMES_BYTES_MAX,
    U64,
    VB_SEQNO,
    pack_failover_log,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import (
    RefusedError,
    Status,
    UnknownNameError,
    WrongVbucketError,
    error_map_document,
)
from vbucket.engine.partition import Partition, VbState
from vbucket.model.datatype import JSON, SNAPPY
from vbucket.model.manifest import DEFAULT_COLLECTION

Handler = Callable[[Frame], None]

REPORTED_VERSION: Final = b"7.6.0"
"""The answer to VERSION. Clients derive abilities from it (some take 0.x for the newest)."""

_ALIVE_STATES: Final = frozenset({VbState.ACTIVE, VbState.REPLICA, VbState.PENDING})
"""kv_engine's "alive": the states that GET_ALL_VB_SEQNOS means when it names none."""
_ANY_STATE: Final = 0
_OF_PARTITIONS: Final = frozenset({b"vbucket-seqno", b"dcp-vbtakeover"})
"""Groups of statistics whose argument names a partition."""
_NEED_XATTR: Final = frozenset({Feature.VATTR, Feature.SUBDOC_DOCUMENT_MACRO_SUPPORT})
_NOT_NOW: Final = frozenset({Status.EBUSY, Status.ETMPFAIL})
"""Statuses of a refused login that say nothing about the password."""


class ConnectionCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.HELLO: self.hello,
            Opcode.SASL_LIST_MECHS: self.list_mechanisms,
            Opcode.SASL_AUTH: self.authenticate,
            Opcode.SASL_STEP: self.authenticate_further,
            Opcode.SELECT_BUCKET: self.select_bucket,
            Opcode.GET_CLUSTER_CONFIG: self.cluster_config,
            Opcode.GET_ERROR_MAP: self.error_map,
            Opcode.NOOP: self.noop,
            Opcode.VERSION: self.version,
            Opcode.STAT: self.statistics,
            Opcode.QUIT: self.quit,
            Opcode.QUITQ: self.quit,
            Opcode.GET_ALL_VB_SEQNOS: self.all_vb_seqnos,
            Opcode.GET_FAILOVER_LOG: self.failover_log,
            Opcode.DCP_GET_FAILOVER_LOG: self.failover_log,
            Opcode.OBSERVE_SEQNO: self.observe_seqno,
        }

    # -- the connection and logins -------------------------------------------------------------

    def hello(self, request: Frame) -> None:
        """Grant the requested features that this server has. A second HELLO replaces the first."""
        state = self._state
        refuse_stray(request, "extras")
        if len(request.value) % 2:
            raise RefusedError(Status.EINVAL, "HELLO carries features of two bytes each")
        asked = [code for (code,) in Struct(">H").iter_unpack(request.value)]
        if Feature.XATTR not in asked and not _NEED_XATTR.isdisjoint(asked):
            raise RefusedError(Status.EINVAL, "features 0x15 and 0x18 go with XATTR (0x06)")
        known = GRANTED if state.shared.replication is None else GRANTED_IN_CLUSTERS
        granted = [code for code in dict.fromkeys(asked) if code in known]
        if Feature.DUPLEX not in granted and not MAP_PUSHES.isdisjoint(granted):
            raise RefusedError(Status.EINVAL, "features 0x0d and 0x1f go with Duplex (0x0c)")
        if (
            state.shared.limits.value_bytes_max < PUT_FRAMES_BYTES_MAX
            and Feature.X_PUT_FRAMES in granted
        ):
            granted.remove(Feature.X_PUT_FRAMES)
        state.hello.agent = request.key.decode("utf-8", "replace")[:256]
        state.hello.hashes_keys = False
        state.hello.has_collections = Feature.COLLECTIONS in granted
        state.map_news.hello(granted)
        state.hello.has_json = int(Feature.JSON in granted or state.producer is not None)
        state.hello.datatypes = state.hello.has_json | SNAPPY * (Feature.SNAPPY in granted)
        state.hello.has_xattr = Feature.XATTR in granted
        state.hello.has_preserve_ttl = Feature.PRESERVE_TTL in granted
        state.hello.has_durability = Feature.SYNC_REPLICATION in granted
        state.hello.has_put_frames = Feature.X_PUT_FRAMES in granted
        state.hello.has_fit_meta = Feature.X_FIT_META in granted
        state.hello.has_mutation_tokens = Feature.MUTATION_SEQNO in granted
        state.hello.has_xerror = Feature.XERROR in granted
        state.answer(request, value=b"".join(code.to_bytes(2, "big") for code in granted))

    def list_mechanisms(self, request: Frame) -> None:
        """Name the SASL mechanisms, strongest first."""
        state = self._state
        refuse_stray(request, "extras", "key", "value")
        names = state.login.authenticator.mechanisms(state.login.peer_is_loopback)
        state.answer(request, value=" ".join(names).encode())

    def authenticate(self, request: Frame) -> None:
        """Begin a SASL exchange. For some mechanisms one message is enough."""
        state = self._state
        refuse_stray(request, "extras")
        mechanism = request.key.decode("ascii", "replace")
        if mechanism not in state.login.authenticator.mechanisms(state.login.peer_is_loopback):
            why = f"no such SASL mechanism: {mechanism}"
            state.refuse(request.opcode, request.opaque, Status.AUTH_ERROR, why)
            self._count_failure()
            return
        self._ask(request, LoginQuestion(mechanism, request.value, None))

    def authenticate_further(self, request: Frame) -> None:
        """Continue a SASL exchange."""
        exchange = self._state.login.exchange
        if exchange is None:
            raise RefusedError(Status.EINVAL, "SASL_STEP comes after SASL_AUTH")
        self._ask(request, LoginQuestion("", request.value, exchange))

    def _ask(self, request: Frame, question: LoginQuestion) -> None:
        """Leave a question for the authenticator. Take no command until it is answered."""
        state = self._state
        state.login.request = request._replace(value=b"")  # the password is the question's alone
        state.login.question = question
        state.is_full = True

    def login_checked(self, step: AuthStep) -> None:
        """Answer the SASL request whose outcome is known now."""
        request, self._state.login.request = self._state.login.request, None
        assert request is not None, "no login is under way"
        self._finish_step(request, step)

    def _finish_step(self, request: Frame, step: AuthStep) -> None:
        state = self._state
        state.login.exchange = step.exchange
        if step.status in {Status.OK, Status.AUTH_CONTINUE}:
            if step.status == Status.OK:
                state.login.logged_in(step.user, step.rights)
            state.answer(request, step.status, value=step.data)
            return
        state.login.logged_in(None, FULL_RIGHTS)
        why = step.why or "user or password is wrong, or not allowed from there"
        state.refuse(request.opcode, request.opaque, step.status, why)
        if step.status not in _NOT_NOW:
            self._count_failure()

    def _count_failure(self) -> None:
        """Close the connection after too many failures, which slows down guessing."""
        state = self._state
        state.login.failures += 1
        if state.login.failures >= state.shared.limits.login_failures_max:
            state.close(
                f"{state.login.failures} logins failed, the limit (setting login_failures_max)"
            )

    def select_bucket(self, request: Frame) -> None:
        """Select the only bucket, or none."""
        state = self._state
        refuse_stray(request, "extras", "value")
        name = request.key.decode("utf-8", "replace")
        if name == "@no bucket@":
            state.map_news.bucket = None
        elif name == state.shared.facts.bucket:
            state.map_news.bucket = name
            state.hello.hashes_keys = False
        else:
            why = f"no bucket {name!r}; there is {state.shared.facts.bucket!r} (setting bucket)"
            raise RefusedError(Status.EACCESS, why)
        state.answer(request)

    def noop(self, request: Frame) -> None:
        """Answer without effect."""
        refuse_stray(request, "extras", "key", "value")
        self._state.answer(request)

    def quit(self, request: Frame) -> None:
        """Close the connection; QUIT is answered first."""
        refuse_stray(request, "extras", "key", "value")
        if request.opcode == Opcode.QUIT:
            self._state.answer(request)
        self._state.close("the client quit")

    # -- the node ------------------------------------------------------------------------------

    def cluster_config(self, request: Frame) -> None:
        """Answer the bucket's configuration, or the node's if no bucket is selected."""
        state = self._state
        refuse_stray(request, "key", "value")
        if request.extras:
            if len(request.extras) != CONFIG_VERSION.size:
                raise RefusedError(Status.EINVAL, "a known version has 16 bytes")
            known = CONFIG_VERSION.unpack(request.extras)
            if state.map_news.take_known(known):
                state.answer(request)
                return
        state.answer(request, value=state.map_news.config(), is_json=True)

    def error_map(self, request: Frame) -> None:
        """Answer what each status means, in the newest format that the client understands."""
        refuse_stray(request, "extras", "key")
        if len(request.value) != 2:
            raise RefusedError(Status.EINVAL, "GET_ERROR_MAP carries a version, 2 bytes")
        version = int.from_bytes(request.value, "big")
        if not version:
            raise RefusedError(Status.KEY_ENOENT, "the error map's first format is version 1")
        document = error_map_document(version)
        self._state.answer(request, value=json.dumps(document).encode(), is_json=True)

    def version(self, request: Frame) -> None:
        """Answer the version of Couchbase Server that this server behaves like."""
        refuse_stray(request, "extras", "key", "value")
        self._state.answer(request, value=REPORTED_VERSION)

    def statistics(self, request: Frame) -> None:
        """Answer one response per statistic, then an empty one."""
        refuse_stray(request, "extras")
        if request.key.startswith(b"detail"):
            self._detail(request)
            return
        if request.key == b"reset":
            self._state.shared.prefixes.clear()
        stats = self._state.shared.facts.stats(request.key + _argument_of(request))
        if stats is None:
            group, _, argument = request.key.partition(b" ")
            known = group in _OF_PARTITIONS and argument
            raise RefusedError(
                Status.NOT_MY_VBUCKET if known else Status.KEY_ENOENT,
                f"no statistics {request.key.decode('utf-8', 'replace')!r}",
            )
        for name, value in stats:
            self._state.answer(request, key=name.encode(), value=value.encode())
        self._state.answer(request)

    def _detail(self, request: Frame) -> None:
        """Count by key prefix: "detail on", "detail off", "detail dump"."""
        state, argument = self._state, request.key.removeprefix(b"detail").strip()
        if state.login.rights is None or not state.login.rights.has(Role.ADMIN):
            raise RefusedError(Status.EACCESS, "counts by key prefix take the role admin")
        if argument == b"dump":
            state.answer(request, key=b"detailed", value=state.shared.prefixes.dump() + b"END\r\n")
        elif not state.shared.prefixes.command(argument):
            raise RefusedError(Status.KEY_ENOENT, "write detail on, detail off or detail dump")
        state.answer(request)

    # -- partition history -----------------------------------------------------------------------

    def all_vb_seqnos(self, request: Frame) -> None:
        """Answer the committed high seqno of every partition in a state (1 to 4; 0: alive)."""
        state = self._state
        refuse_stray(request, "key", "value")
        extras = request.extras
        if len(extras) not in {0, 4, 8} or (len(extras) == 8 and not state.hello.has_collections):
            raise RefusedError(
                Status.EINVAL,
                "extras are empty, a state (4 bytes), or state and collection (8 bytes)",
            )
        wanted = int.from_bytes(extras[:4], "big")
        if wanted > VbState.DEAD:
            raise RefusedError(Status.EINVAL, f"no partition state {wanted}; there are 0 to 4")
        seqno_of = self._seqno_of(extras)
        states = _ALIVE_STATES if wanted == _ANY_STATE else {VbState(wanted)}
        engine = state.engine
        parts = [part for part in engine.partitions if part.durable_state in states]
        for part in parts:
            state.check_is_current(part)
        for part in parts:
            if part.branch_group > engine.commits.committed_group:
                # The branch has lowered its committed_seqno already.
                state.observes_history(part.vb_id)
        state.answer(
            request,
            value=b"".join(VB_SEQNO.pack(part.vb_id, seqno_of(part)) for part in parts),
        )

    def _seqno_of(self, extras: bytes) -> Callable[[Partition], int]:
        """Return the function that gives a partition's high seqno for this client. Without
        collections it is that of the default collection, as in kv_engine: the client sees no more.

        Raises UnknownNameError.
        """
        state = self._state
        engine = state.engine
        if len(extras) != 8:
            if state.hello.has_collections or not engine.keyspace.manifest.uid:
                return lambda part: part.committed_seqno
            return lambda part: engine.keyspace.collection_seqno(part.vb_id, DEFAULT_COLLECTION)
        state.observes_manifest()
        collection_id = int.from_bytes(extras[4:], "big")
        if collection_id not in engine.keyspace.manifest.collections:
            raise UnknownNameError(Status.UNKNOWN_COLLECTION)
        return lambda part: engine.keyspace.collection_seqno(part.vb_id, collection_id)

    def failover_log(self, request: Frame) -> None:
        """Answer a partition's failover log, newest first: all of it on a connection that has asked
        for version lists, otherwise what a plain client knows of.

        A Couchbase DCP client gets it even if it may be out of date, because after a refusal it
        closes its connection with all streams, and java-dcp-client loses changes then. The next
        stream request tells it what is new.
        """
        state = self._state
        refuse_stray(request, "extras", "key", "value")
        producer = state.producer
        if self._has_left(request.vb_id):
            oldest = state.engine.partitions[request.vb_id].failover.pairs()[-1:]
            state.answer(request, value=pack_failover_log(oldest))  # all copies have that one
            return
        part = self._known_here(request.vb_id)
        if producer is None or producer.terms.has_version_lists:
            state.check_is_current(part)
        if part.state in {VbState.FENCED, VbState.REPLICA}:
            state.observes_newest_version(request.vb_id)  # changes may not get committed here
        else:
            state.observes_history(request.vb_id)
        log = part.failover
        pairs = log.shown_pairs() if producer is None else producer.terms.log_for_client(log)
        state.answer(request, value=pack_failover_log(pairs))

    def observe_seqno(self, request: Frame) -> None:
        """Answer the current seqnos of a version, or where it ended if it is an older one.

        A replica tells what it has synced, whether or not it knows that this is committed: clients
        ask which changes a failover to this node would keep. If the partition has left this node, a
        Couchbase DCP client is asked to try again: see `failover_log`.
        """
        state = self._state
        if len(request.value) != U64.size:
            raise RefusedError(Status.EINVAL, "OBSERVE_SEQNO carries a vb_uuid, 8 bytes")
        refuse_stray(request, "extras", "key")
        if self._has_left(request.vb_id):
            raise RefusedError(Status.ETMPFAIL, "the partition has left this node; try again")
        part = self._held_here(request.vb_id)
        state.check_is_current(part)
        if part.state == VbState.REPLICA and part.has_copies:
            state.observes_newest_version(request.vb_id)
            persisted_seqno = high_seqno = part.synced_seqno
        else:
            state.observes_history(request.vb_id)
            persisted_seqno, high_seqno = part.persisted_seqno, part.committed_seqno
        vb_uuid = U64.unpack(request.value)[0]
        ended_at = part.failover.upper_of(vb_uuid, high_seqno)
        if ended_at is None:
            raise RefusedError(
                Status.KEY_ENOENT,
                f"partition {part.vb_id} has no version {vb_uuid} in its failover log",
            )
        place = (part.vb_id, part.vb_uuid, persisted_seqno, high_seqno)
        value = (
            OBSERVE_CURRENT.pack(0, *place)
            if vb_uuid == part.vb_uuid
            else OBSERVE_OLD.pack(1, *place, vb_uuid, ended_at)
        )
        state.answer(request, value=value)

    def _known_here(self, vb_id: int) -> Partition:
        """Return a partition that this node has, dead or not. In a cluster, a partition that is
        dead here is another node's. Raises WrongVbucketError.
        """
        state = self._state
        if vb_id >= state.engine.num_vbuckets:
            raise WrongVbucketError
        part = state.engine.partitions[vb_id]
        if part.state == VbState.DEAD and state.shared.replication is not None:
            raise state.elsewhere(part)
        return part

    def _has_left(self, vb_id: int) -> bool:
        """Whether a Couchbase DCP client, whose map is behind, asks a node of a cluster for a
        partition that it had.
        """
        state, producer = self._state, self._state.producer
        if producer is None or producer.terms.has_version_lists or state.shared.replication is None:
            return False
        if vb_id >= state.engine.num_vbuckets:
            return False
        part = state.engine.partitions[vb_id]
        return part.state == VbState.DEAD and part.leader_epoch > 0  # 0: it never had a copy

    def _held_here(self, vb_id: int) -> Partition:
        """Return a partition that is not dead here. Raises WrongVbucketError."""
        part = self._known_here(vb_id)
        if part.state == VbState.DEAD:
            raise self._state.elsewhere(part)
        return part


def _argument_of(request: Frame) -> bytes:
    """Return what a STAT's value, a JSON object, adds to its key. Only `stream_format` of the group
    `dcp` does; other elements are ignored, as the protocol's documents say.
    """
    if not request.value:
        return b""
    if not request.datatype & JSON:
        raise RefusedError(Status.EINVAL, "the value of STAT needs the datatype JSON")
    try:
        asked = json.loads(request.value)
    except (ValueError, RecursionError):
        raise RefusedError(Status.EINVAL, "the value of STAT is no JSON") from None
    if request.key != b"dcp" or not isinstance(asked, dict) or "stream_format" not in asked:
        return b""
    return b" " + json.dumps({"stream_format": asked["stream_format"]}).encode()
