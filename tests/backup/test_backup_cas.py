"""A restore takes all that a backup holds: a CAS that is too far ahead of the server's clock, or a
revision beyond the highest, which an older server took, costs no document.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time

import pytest

from clients.address import parse_address
from clients.backup.archives.archive import create_archive, open_archive
from clients.backup.archives.point import Point
from clients.backup.restore import Restore
from clients.backup.restore_link import RESTORE_FEATURES
from clients.backup.run import PUSH_FEATURES, Backup
from clients.backup.selection import Selection
from clients.cli.dcpctl import run
from clients.link.blocking_link import SyncLink
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.far_cas import FAR_CAS, KEY, TOP_REV, VB, write_folder
from support.server import DcpdProcess
from vbucket.model.ids import CAS_DRIFT_NS


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The archive of such a folder, and its documents."""
    folder = tmp_path_factory.mktemp("far")
    documents = write_folder(folder / "data")
    with DcpdProcess(folder / "data") as server:
        assert set(shown(server, documents)) == set(documents)
        made = create_archive(str(folder / "archive"), 1)
        asyncio.run(Backup(made, parse_address(server.address)).run())
    return folder / "archive", documents


def restore(server, archive, *, force=False, **options):
    work = Restore(open_archive(str(archive)), Point(), Selection(), force=force, **options)
    return asyncio.run(work.run(parse_address(server.address)))


def shown(server, documents):
    """Key -> (value, revision, CAS) of the documents that are there."""
    found = {}
    with SyncLink(parse_address(server.address)) as link:
        for key in documents:
            got = link.request(Opcode.GET, vb_id=VB, key=b"\0" + key)
            if got.status == Status.OK:
                meta = link.request(Opcode.GET_META, vb_id=VB, key=b"\0" + key)
                rev = struct.unpack(">IIIQ", meta.extras[:20])[3]
                found[key] = got.value, rev, got.cas
    return found


WAYS = {
    "in packets": RESTORE_FEATURES,
    "one by one": (*PUSH_FEATURES, Feature.X_FIT_META),
}


@pytest.mark.parametrize("features", WAYS.values(), ids=list(WAYS))
def test_all_documents_come_back(source, tmp_path, features):
    archive, documents = source
    with DcpdProcess(tmp_path / "data") as server:
        done = restore(server, archive, features=features)
        assert (done.refused, done.kept_newer) == ({}, 0)
        assert done.written == len(documents) + 1, "with the deletion"
        assert done.replaced_cas == len(documents), "of all but one, and of the deletion"
        there = shown(server, documents)
        assert {key: value for key, (value, _, _) in there.items()} == documents
        assert there[KEY][1] == 7
        assert there[b"top"][1] == TOP_REV, "as high as a revision is"
        newest_cas = max(cas for _, _, cas in there.values())
        assert newest_cas <= time.time_ns() + CAS_DRIFT_NS
        assert len({cas for _, _, cas in there.values()}) == len(documents)
        again = restore(server, archive, features=features)
        assert (again.written, again.kept_newer, again.replaced_cas) == (0, len(documents) + 1, 0)
        assert shown(server, documents) == there
        with server.connect() as kv:
            assert kv.set(KEY, b"new").cas < FAR_CAS
        forced = restore(server, archive, force=True, features=features)
        assert (forced.written, forced.replaced_cas) == (len(documents) + 1, len(documents))
        assert shown(server, documents)[KEY][0] == documents[KEY]
        assert server.stop() == 0


def test_the_command_says_how_many(source, tmp_path, capfd):
    archive, documents = source
    with DcpdProcess(tmp_path / "data") as server:
        arguments = ["--server", server.address, "backup", "restore", "--archive", str(archive)]
        assert run(arguments) == 0
        said = capfd.readouterr().out
        assert f"{len(documents)} have a new CAS: the old one was too far ahead" in said
        assert run([*arguments, "--force", "-o", "json"]) == 0
        assert json.loads(capfd.readouterr().out)["replaced_cas"] == len(documents)
