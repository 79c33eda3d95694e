"""What cannot be: each is refused in one line with what to try, and changes nothing."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from clients.cli.dcpctl import EXIT_UNAVAILABLE
from clients.testing import DcpServer
from dcp.server.cluster.cluster_file import ClusterToken
from dcp.server.main import ExitCode
from support.cluster_here import PARTITIONS
from support.credentials import TestCa
from support.etcd_members import EtcdMembers, other_etcd
from support.server import STATUS, dcpctl, done, refused
from support.waiting import until


def is_alone(node: DcpServer) -> bool:
    """Whether a node is in no cluster, and takes writes."""
    with node.connect() as kv:
        kv.set(b"probe", b"v")
        kv.delete(b"probe")
    return node.ask("GET", STATUS)["cluster"] == "" and not (node.data / "cluster.json").exists()


def gateway(endpoint: str, path: str, **body: Any) -> Any:
    """Call etcd's HTTP gateway."""
    url = f"http://{endpoint}/v3/{path}"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpServer]:
    with DcpServer(tmp_path_factory.mktemp("alone") / "data") as node:
        yield node


class Stores(NamedTuple):
    """Several etcds."""

    plain: EtcdMembers
    tls: EtcdMembers
    with_users: EtcdMembers
    other_ca: Path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("stores")
    ca, other_ca = TestCa(folder), TestCa(folder, "other")
    pem = str(ca.issue())
    quota = ("--quota-backend-bytes", str(4 << 20))
    with ExitStack() as stack:

        def etcd(name: str, *options: str) -> EtcdMembers:
            (folder / name).mkdir()
            members = EtcdMembers(folder / name, 1, options)
            stack.callback(members.close)
            return members

        with_users = etcd("users")
        (endpoint,) = with_users.endpoints
        gateway(endpoint, "auth/user/add", name="root", password="secret")
        gateway(endpoint, "auth/role/add", name="root")
        gateway(endpoint, "auth/user/grant", user="root", role="root")
        gateway(endpoint, "auth/enable")
        tls = etcd("tls", "--cert-file", pem, "--key-file", pem)
        yield Stores(etcd("plain", *quota), tls, with_users, other_ca.path)


def no_init(node: DcpServer, url: str) -> str:
    """Try to make a cluster; return what is said."""
    text = refused(node, "init", "--meta", url)
    assert text.startswith("dcpctl: the cluster was not made: "), text
    assert len(text.splitlines()) <= 2, "what and why in one line, what to try in another"
    assert is_alone(node)
    return text


def test_an_etcd_that_is_down_or_unknown(alone: DcpServer, tmp_path: Path) -> None:
    # Each waits for five seconds: both do so at the same time.
    with DcpServer(tmp_path / "other") as other, ThreadPoolExecutor() as pool:
        down = pool.submit(no_init, alone, "etcd://127.0.0.1:1")
        unknown = pool.submit(no_init, other, "etcd://no-such-host.invalid:2379")
        assert "nothing listens there. Start etcd, or correct the endpoint" in down.result()
        assert "no-such-host.invalid:2379" in unknown.result()
        assert "try: Check that it runs" in unknown.result()


def test_an_etcd_that_does_not_let_the_node_in(alone: DcpServer, stores: Stores) -> None:
    plain = stores.plain.endpoints[0]
    with_users = stores.with_users.endpoints[0]
    for url, words in (
        (f"etcd://someone:secret@{plain}", "etcd knows no users. Leave the user out"),
        (f"etcd://root:wrong@{with_users}", "the user or the password is wrong"),
        (f"etcd://{with_users}", "it asks for a user"),
    ):
        text = no_init(alone, url)
        assert "does not let this node in" in text
        assert words in text
        assert "try: Correct the token, or the URL of --meta" in text


def test_an_etcd_with_other_tls(tmp_path: Path, stores: Stores) -> None:
    plain, tls = stores.plain.endpoints[0], stores.tls.endpoints[0]
    for number, (endpoint, words) in enumerate(
        ((tls, "not signed by the CA that was given"), (plain, "it speaks no TLS"))
    ):
        url = f"etcd://{endpoint}?ca={stores.other_ca}"
        with DcpServer(tmp_path / str(number), "--cluster-meta", url) as node:
            text = no_init(node, url)
        assert "does not let this node in" in text
        assert words in text


def test_no_file_is_read_for_a_caller_of_the_api(alone: DcpServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("what only the server may read")
    for option in ("ca", "cert", "key", "password"):
        for path in (secret, tmp_path / "missing"):
            url = f"etcd://someone@127.0.0.1:1?{option}={path}"
            token = ClusterToken(cluster="c" * 16, meta=url, secret="s" * 32).to_text()
            for text in (
                refused(alone, "init", "--meta", url),
                refused(alone, "init", "--meta", url, "--dry-run"),
                refused(alone, "join", "--token", token),
            ):
                assert f"names files of this node: {path}" in text
                assert "setting cluster_meta" in text
    assert is_alone(alone)


def test_an_etcd_that_is_too_old(alone: DcpServer) -> None:
    with other_etcd("3.3.27") as endpoint:
        text = no_init(alone, f"etcd://{endpoint}")
    assert f"etcd at {endpoint}: it is version 3.3.27, and 3.4 or newer is needed" in text
    assert "Update it, 3.5 or newer is best" in text
    assert "try: Do that, or name another etcd with --meta" in text


def test_a_url_that_is_none(alone: DcpServer, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    for url, words in (
        ("http://127.0.0.1:2379", "is not possible: no such kind"),
        ("etcd://", "is not possible"),
        ("etcd://127.0.0.1:2379?co=x", "option 'co'"),
    ):
        assert words in no_init(alone, url)
    url = f"etcd://127.0.0.1:2379?ca={missing}"
    with DcpServer(tmp_path / "data", "--cluster-meta", url) as node:
        assert f"{missing}: cannot be read: No such file" in no_init(node, url)


def fill(endpoint: str) -> None:
    """Write until etcd refuses it."""
    value = base64.b64encode(bytes(100_000)).decode()
    for number in range(200):
        key = base64.b64encode(b"/other/%d" % number).decode()
        gateway(endpoint, "kv/put", key=key, value=value)


def test_an_etcd_that_is_full(alone: DcpServer, stores: Stores) -> None:
    endpoint = stores.plain.endpoints[0]
    with pytest.raises(urllib.error.HTTPError):
        fill(endpoint)
    text = no_init(alone, f"etcd://{endpoint}")
    assert "the metadata store refuses this" in text
    assert "etcdctl alarm disarm" in text
    below, above = (base64.b64encode(key).decode() for key in (b"/dcpd/", b"/dcpd0"))
    found = gateway(endpoint, "kv/range", key=below, range_end=above)
    assert "kvs" not in found, "nothing was written"


def test_tokens_and_folders_that_do_not_fit(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "a") as a, DcpServer(tmp_path / "b") as b:
        token = done(a, "init", "--copies", "3", "--name", "a").strip()
        until(lambda: a.ask("GET", STATUS)["served_here"] == PARTITIONS)
        # More copies than nodes: it runs with what there is, and says so.
        assert "3 copies are wanted, but the number of nodes is 1" in done(a, "status")
        with a.connect() as kv:
            kv.set(b"k", b"v")

        wrong = msgspec.structs.replace(ClusterToken.from_text(token), secret="w" * 43)
        text = refused(b, "join", "--token", wrong.to_text())
        assert "does not let this node in" in text
        assert "try: Correct the token" in text
        gone = msgspec.structs.replace(ClusterToken.from_text(token), cluster="0" * 32)
        text = refused(b, "join", "--token", gone.to_text())
        assert "the metadata store has no such cluster" in text
        assert "try: Get a new token with `dcpctl cluster token` on a member" in text
        text = refused(b, "join", "--token", token, "--rack", "r1")
        assert "node a names none" in text
        assert is_alone(b)

        # A member stays what it is.
        before = a.ask("GET", STATUS)["cluster"]
        for other in (token, gone.to_text()):
            text = refused(a, "join", "--token", other)
            assert f"this node is a member already: 'a' of cluster {before}" in text
            assert "try: To make it a member of another one" in text
        assert "member already" in refused(a, "init")
        assert a.ask("GET", STATUS)["cluster"] == before
        assert dcpctl(b, "join").returncode == 2


def test_a_node_without_a_link_each_way_does_not_join(tmp_path: Path) -> None:
    """By a command on a node that runs, and at a start, before the node listens."""
    pem = TestCa(tmp_path).issue()
    unreached = ("--advertise-host", "127.0.0.9", "--lease", "2s")
    with_tls = (
        "--cluster-tls", "on", "--tls-cert", str(pem), "--cluster-ca", str(tmp_path / "ca.pem"),
        "--tls-port", "0", "--admin-tls-port", "0",
    )  # fmt: skip
    texts = {
        unreached: "node a gets no link to this node: no connection to node b at 127.0.0.9:",
        with_tls: "this node gets no link to node a: node a offers no TLS. Start it with --tls",
    }
    token = tmp_path / "token"

    def start(options: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dcp.server.main", "--data", str(tmp_path / options[0]),
             "--port", "0", "--admin-port", "0", "--cluster", "join", "--node-name", "b",
             "--cluster-token-file", str(token), *options],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    with DcpServer(tmp_path / "a") as a, DcpServer(tmp_path / "b", *unreached) as b:
        token.write_text(done(a, "init", "--copies", "3", "--name", "a"))
        until(lambda: a.ask("GET", STATUS)["served_here"] == PARTITIONS)
        members = a.ask("GET", STATUS)["nodes"]
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(refused, b, "join", "--token-file", str(token), "--name", "b")
            started = {options: pool.submit(start, options) for options in texts}
        assert texts[unreached] in asked.result()
        assert "try: Check that --advertise-host and the port" in asked.result()
        assert is_alone(b)
        for options, ended in started.items():
            assert f"this node does not become a member: {texts[options]}" in ended.result().stderr
            assert "Traceback" not in ended.result().stderr
            assert ended.result().returncode == ExitCode.FOLDER
            assert not (tmp_path / options[0] / "cluster.json").exists()
        assert [each["name"] for each in a.ask("GET", STATUS)["nodes"]] == ["a"]
        assert len(members) == 1


def test_join_while_store_is_away_has_exit_codes_of_its_own(
    alone: DcpServer, tmp_path: Path
) -> None:
    token = ClusterToken(cluster="ab" * 16, meta="etcd://127.0.0.1:1", secret="s" * 43).to_text()
    (tmp_path / "token").write_text(token)
    with ThreadPoolExecutor() as pool:  # each waits for five seconds
        asked = pool.submit(dcpctl, alone, "join", "--token", token)
        started = subprocess.run(
            [sys.executable, "-m", "dcp.server.main", "--data", tmp_path / "data", "--port", "0",
             "--admin-port", "0", "--cluster", "join", "--cluster-token-file", tmp_path / "token"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    for text in (asked.result().stderr, started.stderr):
        assert "the metadata store does not answer" in text
        assert "Traceback" not in text
    assert asked.result().returncode == EXIT_UNAVAILABLE
    assert started.returncode == ExitCode.META_STORE
    assert is_alone(alone)
