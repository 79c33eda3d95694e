"""Access control: users, limits, TLS, the audit log. One `Access` per node.

Connections, the admin port and the upkeep call it. `tick` applies changes of users, their rights
and certificates while the server runs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, Final

from dcp.server.access.audit import AuditLog
from dcp.server.access.browser_sessions import BrowserSessions
from dcp.server.access.certificates import ServerTls, TlsError, TlsFiles
from dcp.server.access.link_tls import MUTUAL, OFF, LinkTls
from dcp.server.access.logins import KV_TLS, LoginLimits, Logins, PeerLogins
from dcp.server.access.metrics_token import MetricsToken, TokenError
from dcp.server.access.users import Users
from dcp.server.config.settings import Settings
from dcp.server.config.sources import is_loopback
from dcp.server.observe.event_log import EventLog
from dcp.session.access.rights import Role
from dcp.session.node_facts import Limits
from dcp.session.session import Session
from dcp.session.state import SessionState
from dcp.session.text import TextSession
from dcp.wire.opcode import Opcode

AUDIT_OFF: Final = "off"


def tls_files(settings: Settings) -> TlsFiles | None:
    """Return the files of TLS, None if TLS is off. The key may be in the certificate's file."""
    if settings.tls_cert is None:
        return None
    return TlsFiles(
        settings.tls_cert, settings.tls_key or settings.tls_cert, settings.tls_client_ca,
        settings.cluster_ca if settings.cluster_tls == MUTUAL else None,
    )  # fmt: skip


class Access:
    """See the module."""

    def __init__(self, settings: Settings, users: Users, log: EventLog) -> None:
        """Load the files of TLS and of the metrics token, if they are set.

        Raises TlsError, TokenError.
        """
        self.users = users
        self._log = log
        path = None if settings.audit == AUDIT_OFF else settings.data / settings.audit
        self.audit = AuditLog(path, log, bytes_max=settings.audit_bytes_max)
        self.sessions = BrowserSessions(users)
        self.logins = Logins(
            users,
            self.audit,
            LoginLimits(settings.login_failures_per_minute, settings.connections_per_user_max),
        )
        self._handshake_timeout_s = settings.handshake_timeout_s
        self.idle_timeout_s = settings.idle_timeout_s
        self.takes_anonymous = settings.anonymous == "on"
        self.limits = Limits(
            value_bytes_max=settings.value_bytes_max,
            streams_max=settings.streams_max,
            login_body_bytes_max=settings.login_body_bytes_max,
            login_failures_max=settings.login_failures_max,
            syncs_writes=settings.durability == "commit",
            allows_faults=settings.test_mode == "on" or is_loopback(settings.host),
            oversized_set_removes=settings.oversized_set == "remove",
        )
        files = tls_files(settings)
        self._tls = None if files is None else ServerTls(files)
        self.link_tls = None if settings.cluster_tls == OFF else LinkTls(settings)
        """How this node dials others of its cluster; None: without TLS."""
        token_file = settings.metrics_token
        self._metrics_token = None if token_file is None else MetricsToken(token_file)
        self._seen_revision = users.revision

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """The context of the TLS ports, None if there are none."""
        return None if self._tls is None else self._tls.context

    def logins_of(
        self, host: str, peer: str, *, is_tls: bool, certificate: Mapping[str, Any] | None = None
    ) -> PeerLogins:
        """Return the authenticator of a connection; `certificate`: what the client showed, if its
        CA is one of ours.
        """
        return self.logins.peer(host, peer, KV_TLS if is_tls else "kv", certificate or {})

    async def close(self) -> None:
        """Wait for the threads that check passwords and write the audit log, and end them."""
        await self.logins.close()
        await asyncio.to_thread(self.audit.close)

    def denied(self, peer: str, fields: dict[str, object]) -> None:
        """Audit a command refused for lack of rights; `fields` as in SessionState.denial."""
        self.audit.write(
            "denied",
            user=fields["user"],
            peer=peer,
            action=fields["command"],
            role=fields["role"],
            why=fields["reason"],
        )

    def overdue(
        self, session: Session | TextSession, now_ns: int, opened_ns: int, heard_ns: int
    ) -> str:
        """Return why a connection should be closed now, "" if it should not. Monotonic: when it was
        opened, or its user lost all rights, and when its peer last sent something.
        """
        if not session.is_logged_in:
            if now_ns - opened_ns > self._handshake_timeout_s * 1e9:
                limit = f"no login within {self._handshake_timeout_s} s"
                return f"{limit} (setting handshake_timeout)"
            return ""
        idle_s = self.idle_timeout_s
        is_streaming = session.state.sender is not None
        if idle_s and not is_streaming and now_ns - heard_ns > idle_s * 1e9:
            return f"nothing was heard for {idle_s} s (setting idle_timeout)"
        return ""

    def tick(self) -> None:
        """Load changed files of users, certificates and the token."""
        self.users.reload_if_changed()
        self.reload_certificates(always=False)
        self._reload_metrics_token()

    def may_read_metrics(self, token: str) -> bool:
        """Return whether this is the token of the setting metrics_token."""
        return self._metrics_token is not None and self._metrics_token.allows(token)

    def take_users_revision(self) -> bool:
        """Return whether users have changed since this was asked last."""
        before, self._seen_revision = self._seen_revision, self.users.revision
        return before != self._seen_revision

    def apply_rights(self, state: SessionState) -> bool | None:
        """Give a session the rights that its user has now; return whether it may go on to stream.
        None: they are as before.
        """
        if state.login.user is None:
            return None
        rights = self.users.rights_of(state.login.user)
        if rights == state.login.rights:
            return None
        state.login.rights_changed(rights)
        if rights is None:
            return False
        if state.feed is not None:
            return rights.has(Role.REPLICATE)
        return rights.denial(Opcode.DCP_STREAM_REQ, None, b"") is None

    def _reload_metrics_token(self) -> None:
        if self._metrics_token is None:
            return
        try:
            if self._metrics_token.reload_if_changed():
                self._log.info("metrics token reloaded")
        except TokenError as error:
            self._log.error("metrics token not reloaded, the old one stays", reason=str(error))

    def reload_certificates(self, *, always: bool) -> None:
        """Load changed certificates. If they are bad, log that and keep the old ones."""
        if self._tls is None:
            return
        try:
            if self._tls.reload_if_changed(always=always):
                self._log.info("certificates reloaded")
        except TlsError as error:
            self._log.error("certificates not reloaded, the old ones stay", reason=str(error))
