"""A run against another server than before is named as such; a branch of the same one is not."""

from __future__ import annotations

import json

from clients.backup.archives.archive import open_archive
from support.backup_pair import Keys, backup, fill, high_seqnos, lines, restore
from vbucket.model.ids import vbucket_of


def test_another_server_is_named(ctl, server, other, archive):
    fill(server, b"first", 20)
    assert not backup(ctl, server, archive)["other_server"]
    fill(server, b"first", 5)
    assert not backup(ctl, server, archive)["other_server"]
    fill(other, b"second", 20)
    code, out, err = ctl(other, "backup", "run", "--archive", archive)
    assert code == 0, err
    text = out.decode()
    assert "this is another server than before, or the same one with a new data folder" in text
    assert "--run 2 still restores what the archive had before" in text
    assert "rolled back" not in text
    assert not backup(ctl, other, archive)["other_server"]
    code, out, _ = ctl(other, "backup", "list", "--archive", archive, "-o", "json")
    kinds = [run["kind"] for run in lines(out)]
    assert kinds == ["full", "incremental", "other server", "incremental"]
    plan = ("--dry-run", "--prefix", "first")
    assert restore(ctl, server, archive, "--run", 2, *plan)["documents"] == 20
    assert restore(ctl, server, archive, *plan)["documents"] == 0
    records = open_archive(str(archive)).runs()
    assert [record.is_other_server for record in records] == [False, False, True, False]


def test_a_branch_of_the_same_server_is_no_other_server(ctl, server, archive):
    """Every partition of the archive has branched, and the version before is known still."""
    key = b"branched"
    vb_id = vbucket_of(key)
    with Keys(server) as keys:
        keys.set(key, b"1")
        backup(ctl, server, archive)
        keys.set(key, b"2")
    for partition in {vb for vb, seqno in high_seqnos(server).items() if seqno}:
        server.branch(partition, 0 if partition != vb_id else 1)
    report = backup(ctl, server, archive)
    assert report["rollbacks"]
    assert not report["other_server"]


def test_what_a_restore_says_adds_up(ctl, server, other, archive):
    """Documents and deletions are one number, and its parts are named."""
    fill(server, b"sum", 25)
    with Keys(server) as keys:
        for key in (b"sum0", b"sum1"):
            keys.delete(key)
    backup(ctl, server, archive)
    arguments = ("backup", "restore", "--archive", archive, "--prefix", "sum")
    code, out, err = ctl(other, *arguments, "--dry-run")
    assert code == 0, err
    assert "would restore 23 documents and 2 deletions of " in out.decode()
    code, out, err = ctl(other, *arguments)
    assert code == 0, err
    assert out.startswith(b"restored 25 of 25 changes (23 documents and 2 deletions) of "), out
    report = json.loads(ctl(other, *arguments, "-o", "json")[1])
    total = report["documents"] + report["deletions"]
    assert report["written"] + report["kept_newer"] == total == 25
