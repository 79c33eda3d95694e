"""The official `couchbase` package over TLS."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import AuthenticationException, CouchbaseException
from couchbase.options import ClusterOptions, ClusterTimeoutOptions

from clients.cli.dcpctl import run
from support.credentials import TestCa, new_password
from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

WAIT = timedelta(seconds=15)


def tls_port(server: DcpdProcess) -> str:
    line = next(line for line in server.output.splitlines() if "with TLS" in line)
    return line.rpartition(":")[2]


def open_cluster(server: DcpdProcess, login: PasswordAuthenticator, **options: object) -> Cluster:
    cluster = Cluster(
        f"couchbases://127.0.0.1:{tls_port(server)}", ClusterOptions(login, **options)
    )
    cluster.wait_until_ready(WAIT)
    return cluster


def test_couchbases_connects_with_the_ca_and_keeps_out_without(tmp_path: Path) -> None:
    ca = TestCa(tmp_path)
    arguments = ("--tls-port", "0", "--admin-tls-port", "0", "--tls-cert", str(ca.issue()))
    with DcpdProcess(tmp_path / "data", *arguments) as server:
        add = [
            "--server",
            server.address,
            "user",
            "add",
            "reader",
            *new_password("secret1"),
        ]
        assert run([*add, "--role", "read", "--role", "write", "--prefix", "sdk:"]) == 0
        cluster = open_cluster(
            server, PasswordAuthenticator("reader", "secret1"), trust_store_path=str(ca.path)
        )
        collection = cluster.bucket("default").default_collection()
        stored = collection.upsert("sdk:tls", {"is": "encrypted"})
        found = collection.get("sdk:tls")
        assert found.content_as[dict] == {"is": "encrypted"}
        assert found.cas == stored.cas
        with pytest.raises(CouchbaseException):
            collection.upsert("other:tls", {})
        cluster.close()
        short = ClusterTimeoutOptions(bootstrap_timeout=timedelta(seconds=2))
        with pytest.raises((CouchbaseException, AuthenticationException)):
            open_cluster(server, PasswordAuthenticator("reader", "secret1"), timeout_options=short)
