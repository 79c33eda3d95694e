import pytest
from scramp import ScramMechanism

from clients.address import ServerAddress
from clients.errors import AuthenticationError, ConnectError, NoAccessError, error_from_status
from clients.link.handshake import Handshake
from dcp.wire.feature import Feature
from dcp.wire.frame import FrameDecoder, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


def frames(data):
    return FrameDecoder().feed(data)


def answer(handshake, request, status=0, **parts):
    packet = pack_response(request.opcode, status, opaque=request.opaque, **parts)
    return frames(handshake.receive(frames(packet)[0]))


def test_loopback_starts_in_one_write():
    handshake = Handshake(ServerAddress("h", 1, "ada", "pw", "b"), is_loopback=True)
    hello, auth, select, config = frames(handshake.begin())
    assert (auth.key, auth.value) == (b"PLAIN", b"\0ada\0pw")
    assert select.key == b"b"
    assert config.opcode == Opcode.GET_CLUSTER_CONFIG
    granted = Feature.COLLECTIONS.to_bytes(2, "big")
    assert not answer(handshake, hello, value=granted)
    assert not answer(handshake, auth)
    assert not answer(handshake, select)
    assert not handshake.is_done
    assert not answer(handshake, config, value=b"{}")
    assert handshake.is_done
    assert handshake.has_collections
    assert handshake.config == b"{}"


@pytest.mark.parametrize(
    ("offered", "wire_name", "rfc_name"),
    [
        (b"PLAIN SCRAM-SHA1 SCRAM-SHA512 SCRAM-SHA256", "SCRAM-SHA512", "SCRAM-SHA-512"),
        (b"SCRAM-SHA256 SCRAM-SHA1", "SCRAM-SHA256", "SCRAM-SHA-256"),
        (b"SCRAM-SHA1 PLAIN", "SCRAM-SHA1", "SCRAM-SHA-1"),
    ],
)
def test_password_does_not_leave_the_machine(offered, wire_name, rfc_name):
    mechanism = ScramMechanism(rfc_name)
    info = mechanism.make_auth_info("pw")
    server = mechanism.make_server(lambda user: info if user == "ada" else None)
    handshake = Handshake(ServerAddress("h", 1, "ada", "pw"), is_loopback=False)
    hello, mechanisms = frames(handshake.begin())
    answer(handshake, hello)
    (first,) = answer(handshake, mechanisms, value=offered)
    assert first.key == wire_name.encode()
    server.set_client_first(first.value.decode())
    (final,) = answer(
        handshake, first, Status.AUTH_CONTINUE, value=server.get_server_first().encode()
    )
    assert final.opcode == Opcode.SASL_STEP
    server.set_client_final(final.value.decode())
    select, config = answer(handshake, final, value=server.get_server_final().encode())
    answer(handshake, select)
    answer(handshake, config, Status.KEY_ENOENT)
    assert handshake.is_done
    assert handshake.config == b""


def test_plain_is_not_used_outside_of_loopback():
    handshake = Handshake(ServerAddress("h"), is_loopback=False)
    hello, mechanisms = frames(handshake.begin())
    answer(handshake, hello)
    with pytest.raises(AuthenticationError, match="only SCRAM"):
        answer(handshake, mechanisms, value=b"PLAIN")


def test_server_that_proves_nothing_is_not_believed():
    handshake = Handshake(ServerAddress("h"), is_loopback=False)
    hello, mechanisms = frames(handshake.begin())
    answer(handshake, hello)
    (first,) = answer(handshake, mechanisms, value=b"SCRAM-SHA512")
    with pytest.raises(AuthenticationError, match="without proving"):
        answer(handshake, first)


def test_wrong_server_signature_is_refused():
    mechanism = ScramMechanism("SCRAM-SHA-512")
    info = mechanism.make_auth_info("guest")
    server = mechanism.make_server(lambda _user: info)
    handshake = Handshake(ServerAddress("h"), is_loopback=False)
    hello, mechanisms = frames(handshake.begin())
    answer(handshake, hello)
    (first,) = answer(handshake, mechanisms, value=b"SCRAM-SHA512")
    server.set_client_first(first.value.decode())
    (final,) = answer(
        handshake, first, Status.AUTH_CONTINUE, value=server.get_server_first().encode()
    )
    with pytest.raises(AuthenticationError, match="SCRAM failed"):
        answer(handshake, final, value=b"v=AAAA")


def test_refused_password():
    handshake = Handshake(ServerAddress("h", 1, "eve"), is_loopback=True)
    hello, auth, *_ = frames(handshake.begin())
    answer(handshake, hello)
    with pytest.raises(AuthenticationError, match="'eve' was refused"):
        answer(handshake, auth, Status.AUTH_ERROR)


def test_refused_bucket():
    handshake = Handshake(ServerAddress("h"), is_loopback=True)
    hello, auth, select, _ = frames(handshake.begin())
    answer(handshake, hello)
    answer(handshake, auth)
    with pytest.raises(NoAccessError, match="'default'"):
        answer(handshake, select, Status.EACCESS)


def test_answer_out_of_turn():
    handshake = Handshake(ServerAddress("h"), is_loopback=True)
    _, auth, *_ = frames(handshake.begin())
    with pytest.raises(ConnectError, match="unexpected answer"):
        answer(handshake, auth)


def test_error_says_what_the_server_said():
    body = b'{"error":{"context":"too soon","ref":"1"}}'
    error = error_from_status(Status.EINVAL, "set", body=body, vb_id=3, key=b"k\xff", node="n:1")
    assert "too soon" in str(error)
    assert "partition 3" in str(error)
    assert "n:1" in str(error)
    assert "\\xff" in str(error)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"error":5}', b'{"error":{"context":5}}'])
def test_error_body_that_is_none_of_ours_is_left_out(body):
    error = error_from_status(0xFFFE, "get", body=body)
    assert str(error) == "get: unknown status (0xfffe)"


def test_rollback_and_not_my_vbucket_carry_their_bodies():
    assert error_from_status(Status.ROLLBACK, "x", body=(9).to_bytes(8, "big")).to_seqno == 9
    assert error_from_status(Status.NOT_MY_VBUCKET, "x", body=b"{}").config == b"{}"
