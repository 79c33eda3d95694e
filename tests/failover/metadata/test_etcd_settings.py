"""Settings of the client of etcd, as a URL, and what is wrong with them."""

from __future__ import annotations

import pytest

from failover.metadata.etcd.settings import EtcdSettings, settings_of_url
from failover.metadata.etcd.trouble import trouble_of, version_trouble, version_warning

FILES = {"ca.pem": b"CA", "c.pem": b"CERT", "k.pem": b"KEY", "pw": b"from a file\n"}


def parsed(url):
    return settings_of_url(url, b"/dcpd/x/", FILES.__getitem__)


def test_a_url_with_everything():
    url = "etcd://me:a%40b@h1:2379,[::1]:2380,10.0.0.3:2379?ca=ca.pem&cert=c.pem&key=k.pem"
    assert parsed(url) == EtcdSettings(
        ("h1:2379", "[::1]:2380", "10.0.0.3:2379"), b"/dcpd/x/", "me", "a@b", b"CA", b"CERT", b"KEY"
    )


def test_the_password_can_be_in_a_file():
    assert parsed("etcd://me@h:1?password=pw").password == "from a file"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://h:1", "etcd://HOST:PORT,HOST:PORT is"),
        ("etcd://", "etcd://HOST:PORT,HOST:PORT is"),
        ("etcd://h:1/prefix", "etcd://HOST:PORT,HOST:PORT is"),
        ("etcd://h", "HOST:PORT is expected"),
        ("etcd://h:1,", "HOST:PORT is expected"),
        ("etcd://h:1?tls=1", "one of ca, cert, key, password is expected"),
        ("etcd://h:1?cert=c.pem", "needs its private key"),
        ("etcd://h:1?cert=c.pem&key=k.pem", "needs TLS"),
        ("etcd://:pw@h:1", "without a user"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url, text):
    with pytest.raises(ValueError, match=text):
        parsed(url)


@pytest.mark.parametrize("rest", ["@h", "@h:1/x", "@h:1?tls=1", "/more@h:1"])
def test_a_password_is_not_shown(rest):
    with pytest.raises(ValueError) as refused:
        parsed(f"etcd://me:very-secret{rest}")
    assert "very-secret" not in str(refused.value)
    assert "very-secret" not in repr(parsed("etcd://me:very-secret@h:1?ca=ca.pem"))


def test_no_endpoint_is_refused():
    with pytest.raises(ValueError, match="no endpoint of etcd was given"):
        EtcdSettings((), b"/").check()


@pytest.mark.parametrize(
    ("version", "is_too_old", "is_old"),
    [
        ("3.3.27", True, True), ("", True, True), ("3.4.23", False, True),
        ("3.5.0", False, False), ("3.6.1", False, False), ("4.0.0", False, False),
    ],
)  # fmt: skip
def test_versions(version, is_too_old, is_old):
    assert bool(version_trouble("h:1", version)) == is_too_old
    assert bool(version_warning(version)) == is_old


def test_a_trouble_that_is_not_known_is_told_as_it_came():
    assert trouble_of("h:1", "some\nnew  thing") == "etcd at h:1: some new thing"
    assert trouble_of("h:1", "") == "etcd at h:1: no reason was given"
