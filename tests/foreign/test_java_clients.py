"""Clients of the Java world against a live server; scripts/test copies them into .venv/java."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clients import KvClient
from clients.address import parse_address
from clients.cli.dcpctl import run as dcpctl
from clients.link.blocking_link import SyncLink
from dcp.wire.opcode import Opcode
from support.server import DcpdProcess
from support.subdoc_client import XATTR, mutation_value
from vbucket.model.ids import vbucket_of

pytestmark = pytest.mark.foreign

SOURCES = Path(__file__).parent / "java"
JARS = Path(__file__).parents[2] / ".venv" / "java"
APP = b'{"by":"app"}'
LARGE = b"the same again " * 1000


def run(client: str, *arguments: str) -> str:
    """Run a program and return what it printed."""
    java = shutil.which("java")
    if java is None or shutil.which("javac") is None:
        pytest.skip("the commands java and javac are missing (a JDK, 17 or newer)")
    if not list(JARS.glob("*.jar")):
        pytest.skip("the Java clients are not installed; scripts/test does it with Maven")
    ran = subprocess.run(
        [java, "-cp", f"{JARS}/*", str(SOURCES / f"{client}.java"), *arguments],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def add_xattrs(server: DcpdProcess, *keys: bytes) -> None:
    upsert = Opcode.SUBDOC_DICT_UPSERT
    value = mutation_value((upsert, XATTR, b"_sync", b'"s"'), (upsert, XATTR, b"meta", APP))
    with SyncLink(parse_address(server.address)) as link:
        for key in keys:
            added = link.request(
                Opcode.SUBDOC_MULTI_MUTATION, vb_id=vbucket_of(key), key=b"\0" + key, value=value
            )
            assert added.status == 0


def test_the_sdk_connects_and_works(server: DcpdProcess) -> None:
    assert run("CouchbaseClient", server.address).endswith("ok\n")


async def test_java_dcp_client_gets_everything_in_every_mode(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        assert dcpctl(["--server", server.address, "collection", "create", "shop.orders"]) == 0
        documents = {f"plain-{number}": b"v" * number for number in range(20)} | {"large": LARGE}
        orders = {f"order-{number}": LARGE[: number * 100] for number in range(20)}
        async with KvClient.connect(server.address) as client:
            for key, value in documents.items():
                await client.set(key, value)
            for key, value in orders.items():
                await client.collection("shop.orders").set(key, value)

        add_xattrs(server, b"large", b"plain-3")

        def streamed(*arguments: str) -> dict[str, str]:
            lines = run("DcpClient", server.address, *arguments).splitlines()
            return {key: seen for key, _, seen in (line.partition(" ") for line in lines)}

        lengths = {key: str(len(value)) for key, value in (documents | orders).items()}
        lengths["large"] += ' _sync="s" meta={"by":"app"}'
        lengths["plain-3"] += ' _sync="s" meta={"by":"app"}'
        for compression in ("DISABLED", "FORCED"):
            assert streamed(compression) == lengths, compression
        lengths = {key: str(len(value)) for key, value in orders.items()}
        for out_of_order in ("true", "true_with_seqno_advanced"):
            assert streamed("FORCED", "8", out_of_order) == lengths, out_of_order


def test_java_dcp_client_goes_back_where_the_kit_says(tmp_path: Path) -> None:
    """docs/consumers-compared.md has all scenarios; two are played here."""
    javac = shutil.which("javac")
    if javac is None or not list(JARS.glob("*.jar")):
        pytest.skip("a JDK or the Java clients are missing; scripts/test installs them")
    source = SOURCES / "DcpJudged.java"
    subprocess.run([javac, "-cp", f"{JARS}/*", "-d", str(tmp_path), str(source)], check=True)
    names = "rollback-while-away,rollback-inside-a-snapshot"
    asked = ["conformance", "consumer", "-j", "1", "--wait-for", "60", "--scenario", names, "--"]
    assert dcpctl([*asked, "java", "-cp", f"{JARS}/*:{tmp_path}", "DcpJudged"]) == 0
