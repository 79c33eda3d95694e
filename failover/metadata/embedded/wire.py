"""The embedded store's protocol on a connection: frames, messages and proofs. Pure.

Who calls it: both ends of a connection to an embedded store, which runs over loopback only.

    server -> StoreChallenge(nonce)
    client -> StoreLogin(nonce, proof)    the client has the cluster's secret
    server -> StoreWelcome(proof, ...)    so has the server; or StoreRefusal(text), and it closes
    then: StoreCall -> StoreAnswer; WatchBegin -> WatchDelivery...; WatchCancel; StoreBeat

A frame is its length (4 bytes, big-endian) and a message in MessagePack. A proof is an HMAC over
both nonces, so it is good for one connection. The secret is random and long, so that guessing it
from a proof is out of the question; `Keyring` refuses a short one. Nothing is encrypted: nothing
of it leaves the machine.

Limits: a frame before the login has 1 KiB, a request 2 MiB, an answer 64 MiB.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final, TypeAlias

import msgspec

PROTOCOL_VERSION: Final = 1
NONCE_BYTES: Final = 32
LOGIN_FRAME_BYTES_MAX: Final = 1024
"""Strangers cost no more memory than that. A login has about 80 bytes."""
REQUEST_FRAME_BYTES_MAX: Final = 2 << 20
"""A transaction of 1.5 MiB (REQUEST_BYTES_MAX) with 384 entries fits."""
ANSWER_FRAME_BYTES_MAX: Final = 64 << 20
"""More than a store holds; a longer answer is refused, and can be read in parts."""
LENGTH: Final = struct.Struct(">I")


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pass


class StoreChallenge(_Message, tag="challenge"):
    """The server's first message."""

    version: int
    nonce: bytes


class StoreLogin(_Message, tag="login"):
    """The client's answer to a challenge."""

    version: int
    nonce: bytes
    proof: bytes


class StoreWelcome(_Message, tag="welcome"):
    """The login is good."""

    proof: bytes
    store_id: bytes
    """Made with the store's file: another id is another history."""
    revision: int


class StoreRefusal(_Message, tag="refusal"):
    """The server closes the connection, for this reason."""

    text: str


class StoreCall(_Message, tag="call"):
    """A request."""

    call_id: int
    request: msgspec.Raw


class StoreAnswer(_Message, tag="answer"):
    """The result of a request."""

    call_id: int
    result: msgspec.Raw


class WatchBegin(_Message, tag="watch"):
    """Begin a watch."""

    watch_id: int
    prefix: bytes
    from_revision: int


class WatchCancel(_Message, tag="cancel"):
    """End a watch."""

    watch_id: int


class WatchDelivery(_Message, tag="delivery"):
    """A message of a watch."""

    watch_id: int
    message: msgspec.Raw


class StoreBeat(_Message, tag="beat"):
    """The server's sign of life."""

    revision: int


ToServer: TypeAlias = StoreLogin | StoreCall | WatchBegin | WatchCancel
ToClient: TypeAlias = (
    StoreChallenge | StoreWelcome | StoreRefusal | StoreAnswer | WatchDelivery | StoreBeat
)

_TO_SERVER: Final[msgspec.msgpack.Decoder[ToServer]] = msgspec.msgpack.Decoder(ToServer)
_TO_CLIENT: Final[msgspec.msgpack.Decoder[ToClient]] = msgspec.msgpack.Decoder(ToClient)
_encode = msgspec.msgpack.Encoder().encode


class WireError(Exception):
    """The other end sent something that is no message; the text says what."""


def frame_of(message: ToServer | ToClient) -> bytes:
    """Return a message with its length in front."""
    body = _encode(message)
    return LENGTH.pack(len(body)) + body


def frame_length(head: bytes, bytes_max: int) -> int:
    """Return how many bytes follow.

    Raises:
        WireError: more than allowed.
    """
    (length,) = LENGTH.unpack(head)
    if length > bytes_max:
        raise WireError(f"a message of {length} bytes; at most {bytes_max} are allowed here")
    return int(length)


def read_to_server(body: bytes) -> ToServer:
    """Decode what a client sent.

    Raises:
        WireError: it is no message of a client.
    """
    try:
        return _TO_SERVER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no message of a client of the metadata store: {error}") from None


def read_to_client(body: bytes) -> ToClient:
    """Decode what a server sent.

    Raises:
        WireError: it is no message of a server.
    """
    try:
        return _TO_CLIENT.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no message of a metadata store: {error}") from None


def client_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Prove to the server that the client has the secret."""
    return _proof(secret, b"client", server_nonce, client_nonce)


def server_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Prove to the client that the server has the secret."""
    return _proof(secret, b"server", server_nonce, client_nonce)


def is_same_proof(one: bytes, other: bytes) -> bool:
    """Compare proofs; it takes the same time for right and wrong ones."""
    return hmac.compare_digest(one, other)


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    assert len(server_nonce) == len(client_nonce) == NONCE_BYTES
    text = b"dcpd metadata store, " + side + b"\x00" + server_nonce + client_nonce
    return hmac.digest(secret, text, "sha256")
