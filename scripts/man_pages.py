"""Writes the man pages of dcpd, dcpctl and all its commands, from their click definitions.

Usage: python scripts/man_pages.py FOLDER

The text is that of --help. A page has no date, so the same sources give the same pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from clients.cli.dcpctl import cli
from dcp import __version__
from dcp.server.main import EXIT_CODES_TEXT, server_command


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name of each page, such as dcpctl-vb-branch, and its roff text."""
    for name, command in (("dcpd", server_command()), ("dcpctl", cli)):
        yield from _pages(click.Context(command, info_name=name))


def _pages(context: click.Context) -> Iterator[tuple[str, str]]:
    command = context.command
    yield _name_of(context), page(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            yield from _pages(click.Context(found, info_name=name, parent=context))


def page(context: click.Context) -> str:
    """Return the page of one command."""
    command, name = context.command, _name_of(context)
    help_text = (command.help or "").partition("\f")[0].strip()
    summary, _, rest = help_text.partition("\n\n")
    lines = [
        f'.TH "{name.upper()}" "1" "" "dcpd {__version__}" "dcpd"',
        ".SH NAME",
        f"{name} \\- {_text(re.split(r'[.:;](?: |$)', _one_line(summary))[0])}",
        ".SH SYNOPSIS",
        f".B {_text(context.command_path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        _text(_one_line(summary)),
        *_paragraphs(rest),
        *_section("OPTIONS", _options(context)),
        *_section("COMMANDS", _commands(context)),
    ]
    epilog = command.epilog or (EXIT_CODES_TEXT if name == "dcpd" else "")
    if epilog:
        lines += [".SH EXIT STATUS", _text(_one_line(epilog))]
    if context.parent is not None:
        lines += [".SH SEE ALSO", f".BR {_name_of(context.parent)} (1)"]
    return "\n".join(lines) + "\n"


def _name_of(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _paragraphs(text: str) -> list[str]:
    """Return paragraphs. Click marks one whose lines stay as they are with a backspace."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("\b"):
            head, *literal = paragraph.removeprefix("\b").strip("\n").split("\n")
            lines += [".PP", _text(head), ".nf", *(_text(line) for line in literal), ".fi"]
        elif paragraph.strip():
            lines += [".PP", _text(_one_line(paragraph))]
    return lines


def _options(context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            yield record


def _commands(context: click.Context) -> Iterator[tuple[str, str]]:
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            yield f"{_name_of(context)}-{name}(1)", found.get_short_help_str(limit=200)


def _section(title: str, rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    found = list(rows)
    if found:
        yield f".SH {title}"
    for term, meaning in found:
        yield from (".TP", f".B {_text(term)}", _text(_one_line(meaning)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _text(text: str) -> str:
    """Escape what roff would take for its own."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith(".") else text


def main() -> None:
    """Write all pages into the folder that is the argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / f"{name}.1").write_text(text)


if __name__ == "__main__":
    main()
