"""The server's half of SCRAM, against the RFCs' examples and an independent client."""

import contextlib
from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramClient

from dcp.session.access.scram import (
    HASH_NAMES,
    MESSAGE_BYTES_MAX,
    MalformedMessageError,
    begin_exchange,
    finish_exchange,
    keys_of_password,
    read_client_first,
)

RFC_NAMES = {
    "SCRAM-SHA1": "SCRAM-SHA-1",
    "SCRAM-SHA256": "SCRAM-SHA-256",
    "SCRAM-SHA512": "SCRAM-SHA-512",
}

RFC_EXAMPLES = {
    # RFC 5802 section 5
    "SCRAM-SHA1": (
        b"n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
        "3rfcNHYJY1ZVvWVs7j",
        "QSXCR+Q6sek8bf92",
        b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    # RFC 7677 section 3
    "SCRAM-SHA256": (
        b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
        "W22ZaJ0SNY7soEsUEjb6gQ==",
        (
            b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
            b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
        ),
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
}


@pytest.mark.parametrize("mechanism", RFC_EXAMPLES)
def test_examples_of_the_rfcs(mechanism):
    first, nonce, salt, final, server_final = RFC_EXAMPLES[mechanism]
    keys = keys_of_password(mechanism, "pencil", salt=b64decode(salt), iterations=4096)
    exchange = begin_exchange(mechanism, read_client_first(first), keys, nonce)
    assert finish_exchange(exchange, final) == server_final


def exchange_with_scramp(mechanism, right="pencil", given_password="pencil", user="user"):
    client = ScramClient([RFC_NAMES[mechanism]], user, given_password)
    keys = keys_of_password(mechanism, right, salt=b"0123456789abcdef", iterations=4096)
    first = read_client_first(client.get_client_first().encode())
    exchange = begin_exchange(mechanism, first, keys, "server-nonce")
    client.set_server_first(exchange.server_first)
    return client, exchange, client.get_client_final().encode()


@pytest.mark.parametrize("mechanism", HASH_NAMES)
def test_an_independent_client_logs_in_and_knows_the_server(mechanism):
    client, exchange, final = exchange_with_scramp(mechanism)
    answer = finish_exchange(exchange, final)
    client.set_server_final(answer.decode())  # raises if the server's signature is wrong


@pytest.mark.parametrize("mechanism", HASH_NAMES)
def test_a_wrong_password_is_refused(mechanism):
    _, exchange, final = exchange_with_scramp(mechanism, given_password="pencils")
    assert finish_exchange(exchange, final) is None


def test_names_with_commas_and_equal_signs_arrive():
    _, exchange, _ = exchange_with_scramp("SCRAM-SHA256", user="a,b=c=2C")
    assert exchange.client_first.user == "a,b=c=2C"


def client_final(exchange, password, *, binding=b"n,,"):
    """What a client would send, made with the keys' own arithmetic."""
    import hashlib
    import hmac

    name = HASH_NAMES[exchange.mechanism]
    salted = hashlib.pbkdf2_hmac(
        name, password.encode(), exchange.keys.salt, exchange.keys.iterations
    )
    client_key = hmac.digest(salted, b"Client Key", name)
    without_proof = f"c={b64encode(binding).decode()},r={exchange.nonce}"
    signed = ",".join((exchange.client_first.bare, exchange.server_first, without_proof)).encode()
    signature = hmac.digest(hashlib.new(name, client_key).digest(), signed, name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return f"{without_proof},p={b64encode(proof).decode()}".encode()


@pytest.mark.parametrize(
    "nonce", ["0x03 0x4a 0xffffff9e 0x7f", "a=b,p", "x,r=y", "\u00fc \t", "=" * 40]
)
def test_nonces_outside_of_the_rfc_only_have_to_come_back(nonce):
    """The C++ SDK's nonce has spaces and signed bytes; only a comma ends an attribute."""
    nonce = nonce.partition(",")[0]
    keys = keys_of_password("SCRAM-SHA512", "secret", salt=b"s" * 16, iterations=1)
    first = read_client_first(f"n,,n=guest,r={nonce}".encode())
    assert first.nonce == nonce
    exchange = begin_exchange("SCRAM-SHA512", first, keys, "server")
    assert exchange.server_first.startswith(f"r={nonce}server,s=")
    assert finish_exchange(exchange, client_final(exchange, "secret"))[:2] == b"v="
    assert finish_exchange(exchange, client_final(exchange, "Secret")) is None


def small_exchange():
    keys = keys_of_password("SCRAM-SHA1", "secret", salt=b"s" * 16, iterations=1)
    return begin_exchange("SCRAM-SHA1", read_client_first(b"n,,n=u,r=c"), keys, "s")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"n",
        b"n,,",
        b"n,,n=u",
        b"n,,r=x,n=u",
        b"n,,n=,r=x",
        b"n,,n=u,r=",
        b"p=tls-unique,,n=u,r=x",
        b"n,,n=u,r=\xff",
        b"n,,n=u,r=" + b"x" * MESSAGE_BYTES_MAX,
    ],
)
def test_malformed_first_messages(message):
    with pytest.raises(MalformedMessageError):
        read_client_first(message)


def test_malformed_final_messages():
    exchange = small_exchange()
    good = client_final(exchange, "secret")
    assert finish_exchange(exchange, good) is not None
    for message in (
        b"",
        b"c=biws,r=cs",
        good.replace(b"r=cs", b"r=xs"),
        good.replace(b"c=biws", b"c=eSws"),
        good.replace(b"c=biws", b"c=%%%%"),
        good[:-4] + b"!!!!",
        good + b"x" * MESSAGE_BYTES_MAX,
        client_final(exchange, "secret", binding=b"y,,"),
    ):
        with pytest.raises(MalformedMessageError):
            finish_exchange(exchange, message)
    assert finish_exchange(exchange, b"c=biws,r=cs,p=") is None
    assert finish_exchange(exchange, b"c=biws,r=cs,p=AAAA") is None


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_apart_or_refused(message):
    with contextlib.suppress(MalformedMessageError):
        first = read_client_first(message)
        assert first.gs2_header.encode() + first.bare.encode() == message
    with contextlib.suppress(MalformedMessageError):
        assert finish_exchange(small_exchange(), message) is None
