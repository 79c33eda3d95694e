"""dcpctl edit: change a document in an editor. Nobody else's change is overwritten."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import click
import msgspec

from clients.cli.dcpctl import ABORTED, Target, help_text, with_target
from clients.cli.documents.document_commands import (
    COLLECTION,
    connected,
    raw_key_of,
    show_mutation,
)
from clients.cli.standard_input import input_is_terminal
from clients.errors import CasMismatchError, DcpdError, NotFoundError
from dcp.wire.opcode import Opcode

EDITOR: Final = "vi"
"""What POSIX has everywhere, if neither VISUAL nor EDITOR names one."""


class EditorError(DcpdError):
    """The editor cannot be started, or ended with an error; nothing was changed."""


@click.command(
    "edit",
    help=help_text(
        "Open a document in the editor of VISUAL or EDITOR, and store what was written there. JSON"
        " of one line is shown on many, and stored as one again. Flags, expiry and XATTRs stay. If"
        " the document has changed meanwhile, nothing is stored, and your text is kept in a file.",
        "dcpctl edit user:1",
        "EDITOR='code --wait' dcpctl edit user:1",
        "dcpctl edit user:2 --create",
    ),
)
@click.argument("key")
@COLLECTION
@click.option("--create", is_flag=True, help="Begin with an empty document if it is missing.")
@with_target
def edit(*, target: Target, key: str, collection: str | None, create: bool) -> None:
    """Change a document in an editor."""
    raw_key = raw_key_of(key)
    with connected(target, collection) as kv:
        try:
            before = kv.get(raw_key)
            expiry_s = kv.metadata(raw_key)["exptime"]
        except NotFoundError:
            if not create:
                raise
            before, expiry_s = None, 0
        shown, is_one_line = _to_edit(b"" if before is None else before.value)
        place = Path(_written(shown))
        written = _edited(place, is_json=is_one_line)
        if written == shown:
            place.unlink()
            click.echo("dcpctl: nothing was changed in the editor; nothing is stored", err=True)
            return
        value = msgspec.json.format(written, indent=-1) if is_one_line else written
        try:
            if before is None:
                result = kv.store(Opcode.ADD, raw_key, value)
            else:
                result = kv.store(
                    Opcode.SET, raw_key, value, flags=before.flags, expiry_s=expiry_s,
                    cas=before.cas,
                )  # fmt: skip
        except DcpdError as error:
            why = "somebody else changed it meanwhile. " * isinstance(error, CasMismatchError)
            error.hint = f"{why}Your text is in {place}. Then again: dcpctl edit {key}"
            raise
    place.unlink()
    show_mutation(target, "stored", raw_key, result)


def _to_edit(value: bytes) -> tuple[bytes, bool]:
    """Return the text for the editor, and whether that is the JSON of one line on many."""
    if value[:1] not in {b"{", b"["} or b"\n" in value:
        return value, False
    try:
        return msgspec.json.format(value, indent=2) + b"\n", True
    except msgspec.DecodeError:
        return value, False


def _written(text: bytes) -> str:
    """Return the name of a new file with the text, which only this user may read."""
    suffix = ".json" if text[:1] in {b"{", b"["} else ".txt"
    handle, name = tempfile.mkstemp(prefix="dcpctl-", suffix=suffix)
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return name


def _edited(place: Path, *, is_json: bool) -> bytes:
    """Return what the editor has written. Raises EditorError, also if the user gives up."""
    begun = place.read_bytes()
    while True:
        _run_editor(place)
        text = place.read_bytes()
        if not begun.endswith(b"\n") and text == begun + b"\n":
            return begun  # editors end the last line
        if not is_json or text == begun:
            return text
        try:
            msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            click.echo(f"dcpctl: it was JSON, and is not any more: {error}", err=True)
            can_ask = input_is_terminal()
            if not (can_ask and click.confirm("Edit it again?", default=True, err=True)):
                raise EditorError(ABORTED, hint=f"Your text is in {place}.") from error
        else:
            return text


def _run_editor(place: Path) -> None:
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or EDITOR
    try:
        done = subprocess.run([*shlex.split(command), str(place)], check=False)  # noqa: S603 - theirs
    except (OSError, ValueError) as error:
        place.unlink()
        raise EditorError(
            f"the editor {command!r} cannot be started: {error}",
            hint="Name one in EDITOR, for example: EDITOR=nano dcpctl edit KEY",
        ) from error
    if done.returncode:
        raise EditorError(
            f"the editor {command!r} ended with {done.returncode}; nothing is stored",
            hint=f"Your text is in {place}.",
        )
