"""dcpctl diff: servers, a mirror's file and an archive, equal and not; exit codes as diff(1)."""

from __future__ import annotations

import asyncio
import json

import pytest

from clients import Mirror
from clients.address import parse_address
from clients.cli.dcpctl import run
from clients.cli.documents.diff_command import _kind_of
from clients.testing import DcpServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff")
    with DcpServer(folder / "one") as one, DcpServer(folder / "two") as two:
        with one.connect() as kv:
            for number in range(300):
                kv.set(b"k%d" % number, b"v")
        yield one, two


def told(capsys, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Run a command; return its exit code and its lines of JSON."""
    code = run([*arguments, "-o", "json"])
    text = capsys.readouterr()
    assert code != 2, text.err
    lines = text.out.splitlines()
    return code, [json.loads(line) for line in lines]


def place_of(server: DcpServer) -> str:
    return parse_address(server.address).node


def test_copies_are_compared(servers, tmp_path, capsys):
    one, two = servers
    view, archive = str(tmp_path / "view"), str(tmp_path / "archive")

    async def mirror() -> None:
        async with Mirror(one.address, view):
            pass

    asyncio.run(mirror())
    at = place_of(one)
    assert run(["--server", at, "backup", "run", "--archive", archive]) == 0
    capsys.readouterr()
    for first, second in ((at, view), (archive, at), (view, archive), (at, at)):
        code, lines = told(capsys, "diff", first, second)
        assert (code, lines[-1]["differences"]) == (0, 0), (first, second)
    # A restore makes the same documents on another server, with CAS and revisions.
    restored = ["backup", "restore", "--archive", archive]
    assert run(["--server", place_of(two), *restored]) == 0
    capsys.readouterr()
    assert told(capsys, "diff", at, place_of(two))[0] == 0
    with one.connect() as kv:
        kv.set(b"k7", b"changed")
        kv.delete(b"k8")
        kv.set(b"new", b"1")
    for other in (view, archive, place_of(two)):
        code, lines = told(capsys, "diff", at, other)
        kinds = {line["key"]: line["kind"] for line in lines[:-1]}
        assert code == 1
        assert kinds == {"k7": "older on B", "k8": "missing on A", "new": "missing on B"}
        assert lines[0]["collection"] == "_default._default"
    code, lines = told(capsys, "diff", at, view, "--limit", "1")
    assert (code, len(lines)) == (1, 2)
    assert run(["diff", at, view]) == 1
    text = capsys.readouterr()
    assert "older on B    k7  (A: revision 2, CAS " in text.out
    assert text.err.startswith("3 keys differ (")


def test_what_cannot_be_compared_is_trouble(servers, tmp_path, capsys):
    one, two = map(place_of, servers)
    assert run(["--server", one, "collection", "add", "shop.orders"]) == 0
    capsys.readouterr()
    assert run(["diff", one, two]) == 2
    assert f"the collections differ: {two} lacks shop.orders" in capsys.readouterr().err
    assert run(["diff", one, two, "--collection", "shop.orders"]) == 2
    assert "has no collection shop.orders" in capsys.readouterr().err
    assert run(["diff", one, two, "--collection", "_default._default"]) in {0, 1}
    for other in ("127.0.0.1:1", f"mirror:{tmp_path}/none", f"archive:{tmp_path}/none"):
        capsys.readouterr()
        assert run(["diff", one, other]) == 2
        assert capsys.readouterr().err.startswith("dcpctl: ")
    assert run(["--server", one, "collection", "remove", "shop.orders"]) == 0


def test_an_argument_says_what_it_is(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert _kind_of(str(tmp_path)) == ("archive", str(tmp_path))
    for name in ("changes", "current"):
        (tmp_path / "table" / name).mkdir(parents=True)
    assert _kind_of(str(tmp_path / "table")) == ("table", str(tmp_path / "table"))
    assert _kind_of(str(tmp_path / "file")) == ("mirror", str(tmp_path / "file"))
    assert _kind_of("s3:11210") == ("server", "s3:11210")
    assert _kind_of("archive:s3://bucket/folder") == ("archive", "s3://bucket/folder")
    assert _kind_of("mirror:11210") == ("server", "mirror:11210"), "a host of that name"
    assert _kind_of("context:main") == ("context", "main")
