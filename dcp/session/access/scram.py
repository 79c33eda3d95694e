"""The server's half of SCRAM (RFC 5802, RFC 7677) over stored keys. Pure.

The table of users calls it. Salts and nonces are handed in.

The clients use scramp instead. Its current releases accept only the RFC's alphabet for nonces, and
the nonce of Couchbase's C++ SDK (`r=0x03 0x4a 0xffffff9e ...`) has spaces in it. Here messages are
split on commas only, and a nonce only has to come back unchanged.

Invariants
- passwords are not kept, only StoredKey and ServerKey. Logging in elsewhere with those would take
  breaking the hash;
- the proof covers both first messages and the final one without its proof, so a changed nonce or
  channel binding fails like a wrong password.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from typing import Final, NamedTuple

HASH_NAMES: Final = {
    "SCRAM-SHA512": "sha512",
    "SCRAM-SHA256": "sha256",
    "SCRAM-SHA1": "sha1",
}
"""Mechanism as named on the wire (without the RFC's last hyphen) -> hash."""

MESSAGE_BYTES_MAX: Final = 2048
"""Longest SCRAM message that is accepted; SDKs send about 200 bytes."""


class MalformedMessageError(Exception):
    """The client's message is not one of this exchange; the text says what is wrong."""


class ScramKeys(NamedTuple):
    """What is stored of a password for one mechanism."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


class ClientFirst(NamedTuple):
    """The decoded first message of a client."""

    gs2_header: str
    bare: str
    user: str
    nonce: str


class ScramExchange(NamedTuple):
    """An exchange between its two messages; `server_first` is what to send now."""

    mechanism: str
    client_first: ClientFirst
    server_first: str
    nonce: str
    keys: ScramKeys


def keys_of_password(mechanism: str, password: str, *, salt: bytes, iterations: int) -> ScramKeys:
    """Derive what is stored of a password. It costs a PBKDF2 of `iterations` rounds."""
    name = HASH_NAMES[mechanism]
    salted = hashlib.pbkdf2_hmac(name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", name)
    return ScramKeys(
        salt,
        iterations,
        hashlib.new(name, client_key).digest(),
        hmac.digest(salted, b"Server Key", name),
    )


def read_client_first(message: bytes) -> ClientFirst:
    """Decode the client's first message: `n,,n=USER,r=NONCE`.

    Raises:
        MalformedMessageError: it is something else, or asks for channel binding.
    """
    text = _text(message)
    parts = text.split(",", 2)
    if len(parts) != 3 or parts[0] not in {"n", "y"}:
        raise MalformedMessageError("the first message must begin with n,, or y,,")
    flag, authzid, bare = parts
    attributes = bare.split(",")
    if len(attributes) < 2 or attributes[0][:2] != "n=" or attributes[1][:2] != "r=":
        raise MalformedMessageError("the first message must hold n=USER,r=NONCE")
    user, nonce = attributes[0][2:], attributes[1][2:]
    if not user or not nonce:
        raise MalformedMessageError("neither the user nor the nonce may be empty")
    user = user.replace("=2C", ",").replace("=3D", "=")
    return ClientFirst(f"{flag},{authzid},", bare, user, nonce)


def begin_exchange(
    mechanism: str, client_first: ClientFirst, keys: ScramKeys, server_nonce: str
) -> ScramExchange:
    """Make the server's first message. `server_nonce` is random and has no comma."""
    assert server_nonce
    assert "," not in server_nonce
    nonce = client_first.nonce + server_nonce
    salt = b64encode(keys.salt).decode()
    server_first = f"r={nonce},s={salt},i={keys.iterations}"
    return ScramExchange(mechanism, client_first, server_first, nonce, keys)


def finish_exchange(exchange: ScramExchange, message: bytes) -> bytes | None:
    """Check the client's final message; return the server's, or None if the proof is wrong.

    Raises:
        MalformedMessageError: it is not `c=...,r=...,p=...`.
    """
    text = _text(message)
    without_proof, comma_p, proof_text = text.rpartition(",p=")
    attributes = without_proof.split(",")
    if not comma_p or attributes[0][:2] != "c=" or attributes[1:2] != [f"r={exchange.nonce}"]:
        raise MalformedMessageError("the final message must hold c=...,r=NONCE,p=PROOF")
    try:
        proof = b64decode(proof_text, validate=True)
        binding = b64decode(attributes[0][2:], validate=True)
    except (Base64Error, ValueError):
        raise MalformedMessageError("c= and p= must be base64") from None
    if binding != exchange.client_first.gs2_header.encode():
        raise MalformedMessageError("c= does not repeat the header of the first message")
    name, keys = HASH_NAMES[exchange.mechanism], exchange.keys
    signed = ",".join((exchange.client_first.bare, exchange.server_first, without_proof)).encode()
    signature = hmac.digest(keys.stored_key, signed, name)
    if len(proof) != len(signature):
        return None
    client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
    if not hmac.compare_digest(hashlib.new(name, client_key).digest(), keys.stored_key):
        return None
    return b"v=" + b64encode(hmac.digest(keys.server_key, signed, name))


def password_matches(mechanism: str, password: str, keys: ScramKeys) -> bool:
    """Check a password itself (PLAIN). Costs a PBKDF2; takes the same time for right and wrong."""
    derived = keys_of_password(mechanism, password, salt=keys.salt, iterations=keys.iterations)
    return hmac.compare_digest(derived.stored_key, keys.stored_key)


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise MalformedMessageError(f"longer than {MESSAGE_BYTES_MAX} bytes")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise MalformedMessageError("not UTF-8") from None
