"""dcpctl discarded: what a replica has cut off, from its discard files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clients.cli.dcpctl import Target, Verbs, help_text, with_target
from clients.cli.output import shown, text_fields, write_json
from vbucket.model.datatype import SNAPPY, inflate
from vbucket.model.receipt import DiscardDamagedError, KeptChange, changes_of, unpack_cut_off

VALUE_BYTES_MAX = 20 << 20
"""No document is longer."""


@click.group(
    "discarded",
    cls=Verbs,
    help=help_text(
        "Look at changes that a replica has cut off.", "dcpctl discarded show FILE.cut -o json"
    ),
)
def discarded() -> None:
    """Look at changes that a replica has cut off."""


@discarded.command(
    "show",
    help=help_text(
        "Print the changes of a discard file. A replica writes one before it cuts off changes"
        " that may have been answered (docs/replication.md). JSON output has the values and one"
        " line for each change; write those that you want back with dcpctl set.",
        "dcpctl discarded show vb0017-version266477440339581-epoch4-9-12.cut",
        "dcpctl discarded show FILE.cut -o json",
    ),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@with_target
def show(*, target: Target, file: Path) -> None:
    """Print the changes of a discard file."""
    mode = target.rows_mode
    if mode == "raw":
        raise click.UsageError("discarded show writes table, plain or json output, not raw")
    try:
        cut = unpack_cut_off(file.read_bytes())
    except DiscardDamagedError as error:
        raise click.ClickException(f"{file}: {error}") from error
    if mode == "json":
        for change in changes_of(cut):
            write_json({"vb": cut.vb_id, "epoch": cut.epoch, **_document(change)})
        return
    columns = [("seqno", "seqno"), ("kind", "kind"), ("collection_id", "collection"),
               ("key", "key"), ("bytes", "bytes")]  # fmt: skip
    rows = [
        (change.seqno, change.kind, change.collection_id, shown(change.key), len(_value(change)))
        for change in changes_of(cut)
    ]
    target.show_rows(columns, rows)


def _document(change: KeptChange) -> dict[str, Any]:
    return {
        "seqno": change.seqno,
        "kind": change.kind,
        "collection_id": change.collection_id,
        **text_fields("key", change.key),
        "datatype": change.datatype & ~SNAPPY,
        **text_fields("value", _value(change)),
    }


def _value(change: KeptChange) -> bytes:
    """Return the value as a client gets it."""
    if change.datatype & SNAPPY:
        return inflate(change.value, VALUE_BYTES_MAX)
    return change.value
