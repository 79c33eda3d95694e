"""Every command of docs/backup.md runs as it stands there, in its order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import cbor2

from clients.backup.archives import archive_manifest as manifest
from clients.backup.archives import chunk, legs, lock, segment, segment_writer
from clients.cli.backup_commands import backup
from clients.cli.dcpctl import run as dcpctl
from support.server import DcpdProcess

PAGE = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()


def commands():
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("dcpctl")]


def test_the_commands_of_the_page(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with DcpdProcess(tmp_path / "data") as server:
        monkeypatch.setenv("DCPCTL_SERVER", server.address)
        for line in commands():
            words = shlex.split(line)
            assert dcpctl(words[1:]) == 0, (line, capfd.readouterr().err)
        capfd.readouterr()
        assert dcpctl(["get", "hello"]) == 0
        assert capfd.readouterr().out == "world", "run 1 was brought back"
    assert (tmp_path / "documents.parquet").stat().st_size > 0


def test_the_page_names_every_command():
    names = set(backup.commands)
    assert {name for name in names if not re.search(rf"`{name}[` ]", PAGE)} == set()


def test_the_page_tells_the_format_as_it_is():
    """Numbers, names and fields of the format, taken from the code."""
    for name in (*manifest.RunRecord._fields, *manifest.MarkRecord._fields):
        assert f"`{name}`" in PAGE, name
    magics = (manifest.RUN_MAGIC, manifest.ARCHIVE_MAGIC, manifest.MARK_MAGIC)
    for magic in (segment.MAGIC, segment.END_MAGIC, *magics):
        assert f"`{magic[:7].decode()}`" in PAGE
        assert magic[7] == segment.FORMAT_VERSION == 1
    assert f"records of {segment.SECTION.size} bytes" in PAGE
    assert f"Number {legs.BASE_LEG} is a base" in PAGE
    assert f"{chunk.CHUNK_BYTES >> 10} KiB before" in PAGE
    assert f"a segment {segment_writer.SEGMENT_BYTES >> 20} MiB" in PAGE
    assert f"free {lock.LEASE_S} s" in PAGE
    builder = segment.SegmentBuilder(1, 0, 1, is_history=True)
    data = builder.finish()
    trailer = data[-segment.TRAILER.size :]
    offset, size = segment.footer_place(trailer)
    raw = segment.decompress(data[offset : offset + size], segment.TRAILER.unpack(trailer)[2])
    for name in cbor2.loads(raw):
        assert f"`{name}`" in PAGE, name
