"""Users: logins of the guest and of added ones, the file, and what strangers can learn."""

import json
import stat
from base64 import b64encode

import pytest
from scramp import ScramClient

from dcp.server.access import users as users_module
from dcp.server.access import users_file
from dcp.server.access.users import (
    USERS_FILE,
    PasswordCheck,
    UnknownUserError,
    UserError,
    Users,
    read_plain,
)
from dcp.server.access.users_file import UsersFileError
from dcp.server.files.kept_twice import read_kept, twin_of, write_kept
from dcp.session.access import scram as scram_module
from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import EVERYTHING, FULL_RIGHTS, Rights, Role, Scope
from dcp.wire.status import Status

RFC_NAMES = {
    "SCRAM-SHA1": "SCRAM-SHA-1",
    "SCRAM-SHA256": "SCRAM-SHA-256",
    "SCRAM-SHA512": "SCRAM-SHA-512",
}


def quick_users(path, **more):
    """PBKDF2 with the least that the client accepts: what is tested does not depend on it."""
    return Users(path, iterations=4096, **more)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / USERS_FILE


@pytest.fixture
def users(path):
    table = quick_users(path)
    table.add("alice", "wonder land!", FULL_RIGHTS)
    return table


def scram(users, name, password, *, mechanism="SCRAM-SHA512", loopback=True):
    client = ScramClient([RFC_NAMES[mechanism]], name, password)
    step = users.start(mechanism, client.get_client_first().encode(), loopback)
    assert step.status == Status.AUTH_CONTINUE
    client.set_server_first(step.data.decode())
    last = users.step(step.exchange, client.get_client_final().encode())
    if last.status == Status.OK:
        client.set_server_final(last.data.decode())
    return last


def plain_message(users, message, *, loopback=True):
    """A login with PLAIN, its derivation included."""
    login = read_plain(message)
    if isinstance(login, AuthStep):
        return login
    check = users.check_of(*login, peer_is_loopback=loopback)
    if not isinstance(check, bool):
        check = users.conclude(check, matches=check.matches())
    return users.plain_step(login.user, is_right=check)


def plain(users, name, password, *, authzid="", loopback=True):
    message = f"{authzid}\0{name}\0{password}".encode()
    return plain_message(users, message, loopback=loopback)


@pytest.mark.parametrize("mechanism", RFC_NAMES)
def test_scram_logins(users, mechanism):
    step = scram(users, "alice", "wonder land!", mechanism=mechanism, loopback=False)
    assert (step.status, step.user, step.exchange) == (Status.OK, "alice", None)
    assert scram(users, "guest", "guest", mechanism=mechanism).user == "guest"
    for wrong in (("alice", "wonderland"), ("bob", "wonder land!"), ("guest", "guess")):
        step = scram(users, *wrong, mechanism=mechanism)
        assert step[:4] == (Status.AUTH_ERROR, b"", None, None)


def test_plain_logins(users):
    assert plain(users, "alice", "wonder land!", loopback=False).user == "alice"
    assert plain(users, "alice", "wonder land!", authzid="alice").status == Status.OK
    assert plain(users, "guest", "guest").status == Status.OK
    for step in (
        plain(users, "alice", "wonder land"),
        plain(users, "bob", "wonder land!"),
        plain(users, "guest", "guest", loopback=False),
        plain(users, "alice", "wonder land!", authzid="bob"),
        plain(users, "alice", "x" * 129),
        plain_message(users, b"\0alice\0\xff"),
    ):
        assert step[:4] == (Status.AUTH_ERROR, b"", None, None)
    for malformed in (b"alice", b"\0alice\0" + b"x" * 2048):
        assert plain_message(users, malformed).status == Status.EINVAL


def test_the_guest_logs_in_from_this_machine_only(users):
    assert scram(users, "guest", "guest", loopback=False).status == Status.AUTH_ERROR
    assert plain(users, "guest", "guest", loopback=False).status == Status.AUTH_ERROR


def test_strongest_mechanism_comes_first_and_others_are_refused(users):
    assert users.mechanisms(False) == ["SCRAM-SHA512", "SCRAM-SHA256", "SCRAM-SHA1", "PLAIN"]
    assert users.start("CRAM-MD5", b"", True).status == Status.AUTH_ERROR


def test_malformed_messages_are_invalid_not_wrong(users):
    assert users.start("SCRAM-SHA1", b"what", True).status == Status.EINVAL
    step = users.start("SCRAM-SHA1", b"n,,n=alice,r=x", True)
    assert users.step(step.exchange, b"what").status == Status.EINVAL


def server_first(users, name, loopback=False):
    step = users.start("SCRAM-SHA512", f"n,,n={name},r=x".encode(), loopback)
    assert step.status == Status.AUTH_CONTINUE
    _, salt, iterations = step.data.decode().split(",")
    return salt, iterations


def test_a_stranger_cannot_tell_which_users_exist(users, path):
    known, unknown = server_first(users, "alice"), server_first(users, "nobody")
    assert known[1] == unknown[1]
    assert len(known[0]) == len(unknown[0])
    assert server_first(users, "nobody") == unknown, "the salt of a stranger must not change"
    assert server_first(quick_users(path), "nobody") == unknown, "nor with a restart"
    assert server_first(users, "nobody2") != unknown
    assert server_first(users, "guest", loopback=False)[1] == known[1]


def test_keys_of_unknown_users_match_nothing(users):
    """An all-zero proof against the zero keys of a stranger."""
    step = users.start("SCRAM-SHA1", b"n,,n=nobody,r=x", True)
    nonce = step.data.split(b",")[0]
    proof = b64encode(bytes(20))
    assert users.step(step.exchange, b"c=biws," + nonce + b",p=" + proof)[:4] == (
        Status.AUTH_ERROR,
        b"",
        None,
        None,
    )


def test_an_unknown_user_costs_as_much_as_a_wrong_password(users, monkeypatch):
    derivations = []
    original = users_module.password_matches

    def counted(mechanism, password, keys):
        derivations.append(keys.iterations)
        return original(mechanism, password, keys)

    monkeypatch.setattr(users_module, "password_matches", counted)
    plain(users, "alice", "wrong!")
    plain(users, "nobody", "wrong!")
    assert derivations == [4096, 4096]


def test_what_takes_no_derivation_tells_nothing_about_who_exists(users):
    for name in ("alice", "nobody"):
        for password in ("wrong!", "", "x" * 128):
            assert isinstance(users.check_of(name, password, peer_is_loopback=True), PasswordCheck)
        assert users.check_of(name, "x" * 129, peer_is_loopback=True) is False
    assert users.check_of("guest", "guest", peer_is_loopback=True) is True
    assert users.check_of("guest", "wrong!", peer_is_loopback=True) is False
    assert isinstance(users.check_of("guest", "guest", peer_is_loopback=False), PasswordCheck)


def test_scram_derives_nothing_for_guests_or_strangers(users, monkeypatch):
    expected = {"alice": True, "guest": True, "nobody": False}
    for module in (users_module, scram_module):
        monkeypatch.setattr(module, "keys_of_password", lambda *_, **__: pytest.fail("derived"))
    for mechanism in RFC_NAMES:
        for name, is_known in expected.items():
            begun = users.start(mechanism, f"n,,n={name},r=x".encode(), True)
            assert begun.exchange.is_known == is_known
            assert begun.exchange.exchanges[0].keys.salt


def test_password_changed_while_checked_lets_nobody_in(users):
    def checked_while(change):
        check = users.check_of("alice", "wonder land!", peer_is_loopback=False)
        matches = check.matches()
        assert matches
        change()
        return users.conclude(check, matches=matches)

    assert checked_while(lambda: users.add("bob", "builder")), "another user's changes nothing"
    users.add(
        "alice", "wonder land!"
    )  # other keys of the same password: what was right is forgotten
    assert not checked_while(lambda: users.set_password("alice", "looking glass"))
    users.set_password("alice", "wonder land!")
    assert not checked_while(lambda: users.remove("alice", force=True))


def test_only_the_first_plain_login_derives_keys(users, monkeypatch):
    assert plain(users, "alice", "wonder land!").status == Status.OK
    monkeypatch.setattr(users_module, "password_matches", lambda *_: pytest.fail("derived again"))
    assert plain(users, "alice", "wonder land!").status == Status.OK


def test_a_new_password_ends_the_old_one(users):
    assert plain(users, "alice", "wonder land!").status == Status.OK
    users.add("alice", "looking glass")
    assert plain(users, "alice", "wonder land!").status == Status.AUTH_ERROR
    assert scram(users, "alice", "looking glass").status == Status.OK
    assert users.names() == ["alice"]


def test_users_are_kept_and_removed(users, path):
    users.add("bob", "builder")
    again = quick_users(path)
    assert again.names() == ["alice", "bob"]
    assert scram(again, "bob", "builder").status == Status.OK
    assert again.remove("bob")
    assert not again.remove("bob")
    assert users.names() == ["alice"], "another process's change is seen"
    assert plain(users, "bob", "builder").status == Status.AUTH_ERROR


def write_document(path, document):
    """Write a content that is sound as a file."""
    document.pop("seal")
    write_kept(path, json.dumps(document).encode())


def test_the_file_holds_no_password_and_is_private(users, path):
    text = path.read_text()
    assert "wonder" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(text)["format_version"] == 3
    assert sorted(path.parent.iterdir()) == [path, twin_of(path)]


@pytest.mark.parametrize(
    ("name", "password", "reason"),
    [
        ("guest", "long enough", "reserved"),
        ("", "long enough", "is not allowed"),
        ("a,b", "long enough", "is not allowed"),
        ("a:b", "long enough", "is not allowed"),
        ("-a", "long enough", "is not allowed"),
        ("a" * 65, "long enough", "1 to 64"),
        ("bob", "short", "has 5 characters; 6 to 128"),
        ("bob", "x" * 129, "has 129 characters"),
        ("bob", "pässwörd", "printable ASCII"),
    ],
)
def test_refused_names_and_passwords(users, name, password, reason):
    with pytest.raises(UserError, match=reason):
        users.add(name, password)
    assert users.names() == ["alice"]


def test_the_guest_cannot_be_removed(users):
    with pytest.raises(UserError, match="built in"):
        users.remove("guest")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        (b"{}", "is damaged"),
        (b'{"format_version": 3, "users": []}', "is damaged"),
        (b'{"format_version": 3, "decoy_key": "", "users": {}}', "is damaged"),
        (b'{"format_version": 2}', "has format version 2, this dcpd knows 3; use the version"),
        (b'{"format_version": 4}', "has format version 4, this dcpd knows 3; use the version"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_left_alone(tmp_path, text, reason):
    path = tmp_path / USERS_FILE
    path.write_bytes(text)
    with pytest.raises(UsersFileError, match=reason):
        quick_users(path)
    assert path.read_bytes() == text


def test_any_flipped_bit_is_damage_or_has_no_effect(users, path):
    """It could lock a user out, let one in, or change what they may do."""
    users.add("bob", "builder", Rights({Role.READ: (Scope(b"key-", None),)}))
    good, content = read_kept(path).content, users._content
    refused = 0
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        try:
            assert users_file.parse_file(path, bytes(bad)) == content
        except UsersFileError:
            refused += 1
    assert refused > len(good) // 2


def test_absurd_iterations_are_damage(users, path):
    document = json.loads(path.read_text())
    document["users"]["alice"]["scram"]["SCRAM-SHA512"]["iterations"] = 0
    document["crc32c"] = users_file.checksum_of(document)
    write_document(path, document)
    with pytest.raises(UsersFileError, match="0 iterations"):
        quick_users(path)


def test_damage_while_running_keeps_what_was_read(users, path, caplog):
    good = path.read_bytes()
    path.write_bytes(b"{")
    assert users.names() == ["alice"]
    assert users.problem == "", "its twin is sound"
    twin_of(path).write_bytes(b"{")
    assert scram(users, "alice", "wonder land!").status == Status.OK
    assert "is damaged" in users.problem
    assert "users file not reloaded" in caplog.text
    with pytest.raises(UsersFileError, match="is damaged"):
        users.add("bob", "builder")
    assert path.read_bytes() == b"{", "a damaged file is never overwritten"
    _written(path.with_name("copy"), good).replace(path)
    assert users.names() == ["alice"]
    assert users.problem == ""


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path):
    (tmp_path / "data").write_text("a file where the folder should be")
    users = quick_users(tmp_path / "elsewhere" / USERS_FILE)
    users._path = tmp_path / "data" / USERS_FILE
    with pytest.raises(UsersFileError, match="cannot be"):
        users.add("bob", "builder")
    assert not users._content.users


def test_an_interrupted_change_leaves_the_old_file(users, path, monkeypatch):
    def failing_fsync(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(users_file.os, "fsync", failing_fsync)
    with pytest.raises(UsersFileError, match="cannot be written: No space left"):
        users.add("bob", "builder")
    monkeypatch.undo()
    assert quick_users(path).names() == users.names() == ["alice"]
    assert sorted(path.parent.iterdir()) == [path, twin_of(path)]


# -- roles ---------------------------------------------------------------------------------------


def test_a_new_user_may_only_read_unless_told(users, path):
    users.add("eve", "apple tree")
    assert users.rights_of("eve") == Rights({Role.READ: (EVERYTHING,)})
    users.add("alice", "wonder land!")
    assert users.rights_of("alice") == FULL_RIGHTS, "a new password takes nothing away"


def test_roles_are_kept_with_the_user(users, path):
    assert users.rights_of("alice") == FULL_RIGHTS
    assert not users.rights_of("alice").has(Role.REPLICATE), "it is granted by name only"
    assert users.grant("alice", Role.REPLICATE).has(Role.REPLICATE)
    assert quick_users(path).rights_of("alice").has(Role.REPLICATE)
    users.revoke("alice", Role.REPLICATE)
    assert plain(users, "alice", "wonder land!").rights == FULL_RIGHTS
    users.add("bob", "builder", Rights({Role.READ: (EVERYTHING,)}))
    assert scram(users, "bob", "builder").rights == Rights({Role.READ: (EVERYTHING,)})
    assert quick_users(path).rights_of("bob") == Rights({Role.READ: (EVERYTHING,)})
    assert users.rights_of("nobody") is None


def test_grants_are_kept_and_taken_back(users, path):
    users.add("bob", "builder", Rights({}))
    scope = Scope("größe:".encode(), "_default._default")
    users.grant("bob", Role.READ, scope)
    users.grant("bob", Role.WRITE)
    expected = Rights({Role.READ: (scope,), Role.WRITE: (EVERYTHING,)})
    assert quick_users(path).rights_of("bob") == users.rights_of("bob") == expected
    users.revoke("bob", Role.READ, scope)
    assert users.revoke("bob", Role.WRITE) == Rights({})
    for refused in (
        lambda: users.grant("nobody", Role.READ),
        lambda: users.grant("guest", Role.READ),
        lambda: users.grant("bob", Role.STREAM, Scope(b"x")),
        lambda: users.revoke("bob", Role.READ),
    ):
        with pytest.raises(UserError):
            refused()
    with pytest.raises(UnknownUserError):
        users.set_password("nobody", "long enough")


def test_a_new_password_leaves_the_roles(users):
    users.add("bob", "builder", Rights({}))
    users.add("bob", "builder2")
    users.set_password("bob", "builder3")
    assert plain(users, "bob", "builder3").rights == Rights({})


@pytest.mark.parametrize(
    "roles",
    [
        {"root": [{}]},
        {"read": [{"prefx": "a"}]},
        {"read": [{"prefix": 1}]},
        {"read": ["a"]},
        {"read": 1},
        {"stream": [{"prefix": "a"}]},
        [],
        None,
    ],
)
def test_roles_that_are_not_understood_are_damage(users, path, roles):
    """Whatever is guessed could open what the file means to close."""
    document = json.loads(path.read_text())
    document["users"]["alice"]["roles"] = roles
    write_document(path, document)
    with pytest.raises(UsersFileError, match="is damaged"):
        quick_users(path)


def test_every_change_has_a_revision_of_its_own(users, path):
    seen = [users.revision]
    users.add("bob", "builder")
    seen.append(users.revision)
    users.grant("alice", Role.READ)
    seen.append(users.revision)
    quick_users(path).remove("bob")
    users.reload_if_changed()
    seen.append(users.revision)
    assert sorted(set(seen)) == seen
    users.reload_if_changed()
    assert users.revision == seen[-1]


def test_a_guest_that_is_switched_off_is_a_stranger(users, path):
    closed = quick_users(path, has_guest=False)
    assert plain(closed, "guest", "guest").status == Status.AUTH_ERROR
    assert scram(closed, "guest", "guest").status == Status.AUTH_ERROR
    assert closed.rights_of("guest") is None
    assert scram(closed, "alice", "wonder land!").status == Status.OK


def test_without_a_guest_one_admin_stays(users, path):
    closed = quick_users(path, has_guest=False)
    for refused in (
        lambda: closed.remove("alice"),
        lambda: closed.revoke("alice", Role.ADMIN),
    ):
        with pytest.raises(UserError, match="last user with the role admin"):
            refused()
    with pytest.raises(UserError, match="guest is switched off"):
        closed.remove("alice", force=True)
    closed.add("bob", "builder", FULL_RIGHTS)
    assert closed.remove("alice")


def test_with_a_guest_the_last_admin_goes_by_force_only(users):
    users.add("bob", "builder")
    for refused in (lambda: users.remove("alice"), lambda: users.revoke("alice", Role.ADMIN)):
        with pytest.raises(UserError, match=r"only guest, .* or use --force"):
            refused()
    assert users.remove("bob"), "he is no admin"
    assert not users.revoke("alice", Role.ADMIN, force=True).has(Role.ADMIN)
    assert users.remove("alice"), "no admin any more"


def _written(path, data):
    path.write_bytes(data)
    return path
