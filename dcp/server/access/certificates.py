"""Certificates of the TLS ports, reloaded while the server runs.

The node passes `context` to the listeners once, and calls `reload_if_changed` now and then. A
handshake begins with the listener's context and moves to the newest one before the certificate is
chosen, so listeners and open connections are not disturbed.

Invariants
- at least TLS 1.2, Python's default ciphers;
- the certificate, key and client CA in use belong together. Files that do not are refused, and
  the previous ones stay in use.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final, NamedTuple

from dcp.server.access.users_file import Stamp, stamp_of

_NO_PASSWORD: Final = ""


class TlsError(Exception):
    """Certificate, key or client CA cannot be used; the text says which and what to do."""


class TlsFiles(NamedTuple):
    """PEM files: the certificate with its chain, its key, and the CA of client certificates."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """If set, clients need a certificate of this CA (and still log in)."""
    node_ca: Path | None = None
    """The CA of the certificates that nodes of the cluster log in with."""


class ServerTls:
    """See the module."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files. Raises TlsError."""
        self._files = files
        self._stamps = self._read_stamps()
        self._current = load_context(files)
        self.context = load_context(files)
        """For listeners."""
        self.context.sni_callback = self._choose

    def reload_if_changed(self, *, always: bool = False) -> bool:
        """Load the files if they have changed; return whether they have.

        Raises TlsError, once per change of the files.
        """
        stamps = self._read_stamps()
        if stamps == self._stamps and not always:
            return False
        self._stamps = stamps
        self._current = load_context(self._files)
        return True

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Called for every handshake, whether the client names a host or not."""
        connection.context = self._current

    def _read_stamps(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in self._files if path is not None]


def load_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for a server's side of TLS. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without this, OpenSSL asks for a password on the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: _NO_PASSWORD)
    except OSError as error:
        raise TlsError(
            f"certificate {files.cert} and key {files.key} cannot be used: {reason_of(error)}; "
            "both must be PEM files, the key unencrypted, the certificate followed by its chain"
        ) from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise TlsError(
                f"client CA {files.client_ca} cannot be used: {reason_of(error)}; it must be PEM"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    elif files.node_ca is not None:
        try:
            context.load_verify_locations(files.node_ca)
        except OSError as error:
            raise TlsError(
                f"--cluster-ca {files.node_ca} cannot be used: {reason_of(error)}; it must be PEM"
            ) from error
        context.verify_mode = ssl.CERT_OPTIONAL  # clients that are no nodes have none
    return context


def reason_of(error: OSError) -> str:
    """Return why a file of TLS cannot be used."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error)
