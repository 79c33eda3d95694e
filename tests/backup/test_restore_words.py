"""What a restore says and ends with when the server has newer versions, and for bad points."""

from __future__ import annotations

import json

import pytest

from clients.backup import restore as restore_module
from clients.cli.dcpctl import run
from clients.testing import DcpServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("words") / "data") as process:
        yield process


@pytest.fixture
def restored(server, tmp_path, capfdbinary):
    """Back up one document, let something happen, restore it; return code, report and text."""

    def backup(*arguments):
        archive = ("--archive", str(tmp_path / "archive"))
        code = run(["--server", server.address, "backup", *arguments, *archive])
        return code, *map(bytes.decode, capfdbinary.readouterr())

    def restore(key, happens, *arguments):
        with server.connect() as kv:
            kv.set(key, b"1")
            assert backup("run")[0] == 0
            happens(kv)
        code, text, _ = backup("restore", "--prefix", key, *arguments)
        code_of_json, out, _ = backup("restore", "--prefix", key, *arguments, "-o", "json")
        assert code == code_of_json
        return code, json.loads(out), " ".join(text.split())

    restore.backup = backup
    return restore


def test_a_deleted_document_needs_force_and_the_restore_says_so(restored, server):
    code, report, text = restored("gone", lambda kv: kv.delete("gone"))
    assert code == 8
    assert (report["result"], report["written"], report["newer_on_server"]) == ("partial", 0, 1)
    assert (
        "nothing was restored: 1 of 1 compared are newer on the server, 1 of them deleted" in text
    )
    assert "--force restores the versions of the archive" in text
    assert restored.backup("restore", "--prefix", "gone", "--force")[0] == 0
    with server.connect() as kv:
        assert kv.get("gone").value == b"1"


def test_a_changed_document_is_kept_and_the_restore_says_so(restored, server):
    code, report, text = restored("newer", lambda kv: kv.set("newer", b"2"))
    assert (code, report["newer_on_server"]) == (8, 1)
    assert "newer on the server, 0 of them deleted" in text
    with server.connect() as kv:
        assert kv.get("newer").value == b"2"


def test_a_restore_that_is_run_again_is_fine(restored):
    code, report, text = restored("same", lambda kv: None)
    assert (code, report["result"], report["kept_newer"]) == (0, "restored", 1)
    assert report["newer_on_server"] == 0
    assert "--force" not in text


def test_only_so_many_documents_are_compared(restored, monkeypatch):
    monkeypatch.setattr(restore_module, "COMPARED_MAX", 2)

    def happens(kv):
        for n in range(5):
            kv.set(f"many{n}", b"1")
        assert restored.backup("run")[0] == 0
        for n in range(5):
            kv.delete(f"many{n}")

    code, _, text = restored("many", happens)
    assert code == 8
    assert "2 of 2 compared are newer" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--time", "yesterday"], "'yesterday' is not a time. Use 2026-05-01T12:00:00Z"),
        (["--seqnos", "{"], "--seqnos is not valid JSON"),
        (["--seqnos", '{"1024": 5}'], "is not a partition"),
        (["--seqnos", "no-such-file"], "No such file"),
        (["--time", "2026-05-01", "--run", "1"], "--time cannot be used with"),
    ],
)
@pytest.mark.parametrize("command", [["restore"], ["export", "--to", "x.jsonl"]])
def test_a_point_that_cannot_be_read_is_a_usage_error(restored, command, arguments, why):
    code, out, err = restored.backup(*command, *arguments)
    assert (code, out) == (2, "")
    assert why in " ".join(err.split())
