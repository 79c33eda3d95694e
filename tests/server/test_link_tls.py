"""Who may log in as a node of the cluster, by the setting cluster_tls."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from dcp.server.access.link_tls import NodeDoor, hosts_of, link_trouble

NODE = {"subjectAltName": (("DNS", "n1.example"), ("IP Address", "10.0.0.1"))}
WILD = {"subjectAltName": (("DNS", "*.Example"), ("email", "n1.example"))}


def door(mode: str, *hosts: str) -> NodeDoor:
    opened = NodeDoor()
    opened.open(mode, lambda: hosts)
    return opened


@pytest.mark.parametrize(
    ("mode", "is_tls", "why"),
    [
        ("off", False, ""),
        ("off", True, ""),
        ("on", True, ""),
        ("on", False, "connect with TLS"),
        ("mutual", True, "log in with certificates"),
        ("mutual", False, "log in with certificates"),
    ],
)
def test_what_the_secret_opens(mode: str, is_tls: bool, why: str) -> None:
    told = door(mode).secret_refusal(is_tls=is_tls)
    assert bool(told) is bool(why)
    assert why in told


def test_on_a_node_alone_a_login_as_a_node_is_a_wrong_login() -> None:
    """It counts as a failure: no reason is given, as for any name that does not exist."""
    assert NodeDoor().secret_refusal(is_tls=False) == ""
    assert not NodeDoor().takes_certificates(NODE)


@pytest.mark.parametrize(
    ("host", "certificate", "is_in"),
    [
        ("n1.example", NODE, True),
        ("N1.EXAMPLE", NODE, True),
        ("10.0.0.1", NODE, True),
        ("::ffff:10.0.0.1", NODE, False),
        ("n2.example", NODE, False),
        ("10.0.0.2", NODE, False),
        ("n2.example", WILD, True),
        ("a.n2.example", WILD, False),
        ("example", WILD, False),
        ("n1.example", {}, False),
    ],
)
def test_a_certificate_is_for_the_host_of_a_member(
    host: str, certificate: dict[str, Any], is_in: bool
) -> None:
    opened = door("mutual", "10.9.9.9", host)
    assert opened.takes_certificates(certificate) is bool(certificate)
    assert (opened.certificate_refusal(certificate) == "") is is_in
    assert door("mutual").certificate_refusal(certificate), "nobody is a member"


def test_only_mutual_takes_certificates() -> None:
    assert not door("on").takes_certificates(NODE)
    assert not door("off").takes_certificates(NODE)


def test_hosts_are_the_names_of_a_certificate_that_mean_hosts() -> None:
    assert hosts_of(WILD) == {"*.example"}


def test_errors_that_are_not_of_tls_are_no_trouble_of_it() -> None:
    assert link_trouble(ConnectionRefusedError(), "node b") is None
    told = link_trouble(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version"), "node b")
    assert told is not None
    assert "node b does not speak TLS at that port" in str(told)
