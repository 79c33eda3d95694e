"""Creates the sessions of connections, and passes their notes to the log, the audit and the meter.

Invariant: a session that fails ends its connection and nothing else, unless it left a change half
applied. Then the server ends (`Tasks.fail`), because it would give wrong answers.
"""

from __future__ import annotations

from typing import Final, Protocol

from dcp.core.groups import Published
from dcp.server.access.access import Access
from dcp.server.access.logins import PeerLogins
from dcp.server.config.sources import is_loopback
from dcp.server.observe.event_log import EventLog, RefusalLog
from dcp.server.observe.housekeeping import Tasks
from dcp.server.observe.meter import Meter
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.state import ClientLogin, Notes, SessionParts, SessionState
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.log.commit_group import CommitGroup


class ReplicationHooks(Protocol):
    """What connections need of the replication of their node. A node alone has none of it.

    `dcp.server.cluster.replicated_node` implements it.
    """

    def held(self) -> HeldAnswers:
        """Return what holds the answers of a new connection."""

    def before_commands(self, now_ns: int) -> None:
        """Fence what may not be answered any more; call it before each batch of requests."""

    def after_commands(self) -> None:
        """A batch of requests was handled."""

    def after_acknowledgement(self) -> None:
        """A replica's acknowledgement was handled. Answers that waited for it leave now."""

    def group_begun(self, group: CommitGroup) -> None:
        """A group is about to be written: the commit path calls this first."""

    def group_published(self, published: Published) -> None:
        """A job of the log is done: tell the parts of the server what that commits."""


CONSOLE: Final = "web console"
"""Stands for the peer in log lines. It is no address, so nothing is allowed because of it."""


_NAMES_OF: Final[dict[str, dict[object, str]]] = {
    "opcode": {int(opcode): opcode.name for opcode in Opcode},
    "status": {int(status): status.name for status in Status},
}
"""Field of a note -> number -> the name that people know."""
_OLDER_MAP: Final = Status.NOT_MY_VBUCKET.name
"""Every client gets it that has an older map: nothing is wrong."""


class Sessions:
    """See the module."""

    def __init__(
        self,
        shared: SessionParts,
        access: Access,
        scrubbing: Scrubbing,
        meter: Meter,
        log: EventLog,
        refusals: RefusalLog,
        tasks: Tasks,
    ) -> None:
        self._shared = shared
        self._access = access
        self._scrubbing = scrubbing
        self._meter = meter
        self._log = log
        self._refusals = refusals
        self._tasks = tasks

    def new_state(self, peer_host: str, logins: PeerLogins) -> SessionState:
        """Return the state of a new session for a peer."""
        login = ClientLogin(
            logins,
            peer_is_loopback=is_loopback(peer_host),
            takes_anonymous=self._access.takes_anonymous,
        )
        return SessionState(self._shared, login)

    def new_console_state(self) -> SessionState:
        """Return the state of a session for a change that the web console makes. The admin port
        has checked the login.
        """
        logins = self._access.logins_of(CONSOLE, CONSOLE, is_tls=False)
        state = self.new_state(CONSOLE, logins)
        # It waits for no partition: nobody would resume it.
        state.shared = state.shared._replace(replication=None)
        return state

    def note_console(self, state: SessionState) -> None:
        """Log and count what such a session noted."""
        self.note(CONSOLE, CONSOLE, state.notes)

    def leave(self, state: SessionState) -> None:
        """End the range scans of a session whose connection is gone."""
        assert self._shared.scans is not None, "a server has them"
        self._shared.scans.leave(state)

    def note(self, peer: str, peer_host: str, notes: Notes) -> None:
        """Log and count what a session noted, and how many notes it had to leave out; they are
        gone then.
        """
        for event, fields in notes.lines:
            self._meter.noted(event, fields)
            if event == "denied":
                self._access.denied(peer, fields)
            elif event == "damaged data":
                vb_id = fields["vb_id"]
                self._scrubbing.met(vb_id if isinstance(vb_id, int) else None)
            for name in _NAMES_OF.keys() & fields.keys():
                fields[name] = _NAMES_OF[name].get(fields[name], fields[name])
            if fields.get("status") == _OLDER_MAP:
                self._log.debug(event, peer=peer, **fields)
            else:
                self._refusals.write(event, peer_host, peer=peer, **fields)
        self._refusals.suppressed_lines += notes.left_out
        notes.lines.clear()
        notes.left_out = 0

    def backfill_failed(self, peer: str, vb_id: int, damage: str) -> None:
        """Log that a stream met damaged data and ended."""
        self._scrubbing.met(vb_id)
        self._log.info("backfill failed", peer=peer, reason=damage)

    def closed_as_usual(self, peer: str, reason: str) -> None:
        """Log an ordinary end of a connection, at level debug."""
        self._log.debug("connection closed", peer=peer, reason=reason)

    def failed(self, error: Exception) -> None:
        """Count and log an unexpected exception of a session."""
        self._meter.session_failures += 1
        self._log.failure("session failed", error)
        if broken := self._shared.engine.keyspace.broken_invariant():
            self._tasks.fail(RuntimeError(f"{broken}, because of {error!r}"))
