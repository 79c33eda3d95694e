"""TLS for clients: the context of a connection, and errors for its failures.

This module is imported only for addresses with TLS, because `ssl` takes 20 ms to load.

Connections use TLS 1.2 or newer. The server's certificate and host name are checked.
"""

from __future__ import annotations

import ssl

from clients.address import ServerAddress
from clients.errors import ConnectError


def client_context(address: ServerAddress) -> ssl.SSLContext:
    """Return the context for connections to a server.

    Raises ConnectError if a file that the address names cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=address.tls_ca or None)
    except OSError as error:
        raise _bad_file("CA", address.tls_ca, error, address.node) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if address.tls_cert:
        try:
            # Without this, OpenSSL asks for the password on the terminal.
            context.load_cert_chain(address.tls_cert, password=lambda: "")
        except OSError as error:
            raise _bad_file("certificate", address.tls_cert, error, address.node) from error
    return context


def connect_error(error: OSError, node: str) -> ConnectError:
    """Return the error for a failed TLS connection attempt."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectError(
            f"the server's certificate is not trusted: {error.verify_message}",
            node=node,
            hint="Set --tls-ca FILE (tls_ca= in an address) to the CA that signed it.",
        )
    if isinstance(error, ssl.SSLError):
        return ConnectError(
            f"no TLS connection: {(error.reason or str(error)).replace('_', ' ').lower()}",
            node=node,
            hint="Check that this is the TLS port (11207). It may require a client certificate.",
        )
    return ConnectError.of(error, node)


def _bad_file(what: str, path: str, error: OSError, node: str) -> ConnectError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return ConnectError(
        f"{what} file {path} cannot be used: {reason or error}",
        node=node,
        hint="Use a PEM file. A client certificate needs its key, unencrypted, in the same file.",
    )
