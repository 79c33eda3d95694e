"""dcpctl repair: versions that a server cannot read any more come from an archive."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import click

from clients.backup.archives.archive import open_archive
from clients.backup.archives.point import Point
from clients.backup.reading import PointReader
from clients.cli.cluster.cluster_nodes import admin_of_named
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL, Target, help_text, with_target
from clients.cli.output import shown_text, write_json, write_raw
from clients.cli.partitions.storage_commands import SCRUB_PATH
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from failover.rules.history import FailoverLog, Version
from failover.rules.repair import why_not_taken
from vbucket.model.entry import PREFIX, key_in_frame

REPAIR_PATH = "/api/v1/repair"


@click.command(
    "repair",
    help=help_text(
        "Take the blocks of versions that the node that is named cannot read any more from an"
        " archive, while it runs. What is damaged is what dcpctl scrub status names. Versions are"
        " taken if they are of the same history, and if the checksums that the server knows of"
        " them prove that they are what was there; so nothing older replaces anything. Exit code 8:"
        " something stays damaged.",
        "dcpctl repair --from-backup backups",
    ),
)
@click.option(
    "--from-backup", "url", required=True, metavar="URL", envvar="DCPCTL_ARCHIVE",
    help="The archive: a folder, or any URL that fsspec supports [DCPCTL_ARCHIVE].",
)  # fmt: skip
@with_target
def repair(*, target: Target, url: str) -> int:
    """Take what is damaged from a backup."""
    archive = open_archive(url)
    reader = PointReader(archive, archive.runs_of(Point()))
    admin = admin_of_named(target)
    rows: list[dict[str, Any]] = admin.request("GET", SCRUB_PATH)["damages"]
    left = 0
    for row in rows:
        try:
            body = _body(target, reader, row)
            admin.request("POST", REPAIR_PATH, body)
            why = ""
        except DcpdError as error:
            why = str(error)
        left += bool(why)
        if target.rows_mode == "json":
            write_json({"where": row["where"], "vb": row["vb"], "seqnos": row["seqnos"],
                        "repaired": not why, "why": why})  # fmt: skip
        else:
            end = f"not repaired: {why}" if why else "repaired"
            write_raw(f"{shown_text(_name(row))}: {shown_text(end)}\n".encode())
    if not rows and target.rows_mode != "json":
        write_raw(b"nothing is damaged, as far as the scrubber has read\n")
    return EXIT_PARTIAL if left else EXIT_OK


def _name(row: dict[str, Any]) -> str:
    seqnos = "" if row["seqnos"] is None else ", seqnos {} to {}".format(*row["seqnos"])
    return f"{row['where']}{seqnos}"


def _body(target: Target, reader: PointReader, row: dict[str, Any]) -> dict[str, Any]:
    """Return the request that repairs a damage. Raises DcpdError."""
    if row["kind"] != "block" or row["vb"] is None or row["seqnos"] is None:
        raise DcpdError("it is no block of versions; an archive has nothing else of it",
                        hint=row["advice"])  # fmt: skip
    vb_id, (first, last) = row["vb"], row["seqnos"]
    known = reader.history(vb_id)
    if known is None:
        raise DcpdError("the archive has nothing of the partition")
    end, theirs = known
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        own = FailoverLog(tuple(Version(*pair) for pair in kv.failover_log(vb_id)))
    why = why_not_taken(own, theirs, last, own_committed=last, committed=end)
    if why:
        raise DcpdError(f"the archive does not have it: {why}")
    entries = [entry for seqno, entry in _entries(reader, vb_id, last) if seqno >= first]
    if not entries:
        raise DcpdError(f"the archive has no versions of seqnos {first} to {last}")
    joined = b64encode(b"".join(entries)).decode()
    return {"vb": vb_id, "key": row["key"], "entries": joined}


def _entries(reader: PointReader, vb_id: int, upto_seqno: int) -> Iterator[tuple[int, bytes]]:
    """Yield seqno and entry, as the server stores it, of what the archive has of a partition."""
    newest: dict[bytes, int] = {}
    for seqno, frame in reader.versions(vb_id, upto_seqno):
        key = key_in_frame(frame)
        stored = frame[:12] + bytes(4) + frame[16:]  # without the opaque of the stream
        yield seqno, PREFIX.pack(newest.get(key, 0), 0) + stored
        newest[key] = seqno
