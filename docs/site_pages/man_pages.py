"""Man pages of dcpd and dcpctl, and completion scripts, from their click definitions.

    python -m site_pages.man_pages FOLDER     a man page for each command, for a release
    share_files()                             what deploy/share has, and a wheel installs: one page
                                              for each program, with all of its commands

The text is that of --help. A page has no date, so the same sources give the same pages. A wheel is
built without the packages that these definitions import, so deploy/share is kept in the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click
from click.shell_completion import get_completion_class

from clients.cli.dcpctl import cli
from dcp import __version__
from dcp.server.main import EXIT_CODES_TEXT, server_command

COMPLETIONS: Final = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
"""Shell -> where it looks, below share/."""


def programs() -> Iterator[click.Context]:
    """Yield dcpd and dcpctl."""
    for name, command in (("dcpd", server_command()), ("dcpctl", cli)):
        # As when it runs: click keeps the option for help that it has made first.
        yield click.Context(command, info_name=name, **command.context_settings)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name of each page, such as dcpctl-vb-branch, and its roff text."""
    for program in programs():
        for context in _contexts(program):
            yield _name_of(context), page(context)


def share_files() -> dict[str, str]:
    """Return the files of deploy/share: path -> text."""
    files = {}
    for program in programs():
        name = program.command_path
        files[f"man/man1/{name}.1"] = book(program)
        for shell, place in COMPLETIONS.items():
            found = get_completion_class(shell)
            assert found is not None, shell
            script = found(cli, {}, name, f"_{name.upper()}_COMPLETE")
            files[place.format(name)] = script.source_template % script.source_vars() + "\n"
    return files


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield a command, and then those that are in it."""
    command = context.command
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            yield from _contexts(click.Context(found, info_name=name, parent=context))


def book(program: click.Context) -> str:
    """Return one page of a program and all of its commands."""
    own, *inner = _contexts(program)
    lines = [page(own, names_pages=False).rstrip()]
    if inner:
        lines.append(".SH COMMANDS IN DETAIL")
    for context in inner:
        summary, _, rest = _help_of(context).partition("\n\n")
        usage = " ".join(context.command.collect_usage_pieces(context))
        lines += [
            f".SS {_text(f'{context.command_path} {usage}')}",
            _text(_one_line(summary)),
            *_paragraphs(rest),
            *_terms(_options(context)),
        ]
    return "\n".join(lines) + "\n"


def _help_of(context: click.Context) -> str:
    return (context.command.help or "").partition("\f")[0].strip()


def page(context: click.Context, *, names_pages: bool = True) -> str:
    """Return the page of one command. `names_pages`: commands in it have pages of their own."""
    command, name = context.command, _name_of(context)
    summary, _, rest = _help_of(context).partition("\n\n")
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
        *_section("COMMANDS", _commands(context, names_pages=names_pages)),
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


def _commands(context: click.Context, *, names_pages: bool) -> Iterator[tuple[str, str]]:
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            title = f"{_name_of(context)}-{name}(1)" if names_pages else name
            yield title, found.get_short_help_str(limit=200)


def _section(title: str, rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    found = list(rows)
    if found:
        yield f".SH {title}"
    yield from _terms(found)


def _terms(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, meaning in rows:
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
