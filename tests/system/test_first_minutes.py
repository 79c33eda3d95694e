"""scripts/first-minutes: how it types and what it measures.

It takes half a minute itself, and needs the default ports and the network, so no test runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from first_minutes import ENDLESS, Terminal, Typed, commands_of, longest_silence  # noqa: E402


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    program = tmp_path / "dcpctl"
    program.write_text("#!/bin/sh\ntrap 'exit 130' INT\necho first\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    terminal = Terminal(tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin", "TERM": "xterm"}, 30)
    yield terminal
    terminal.close()


def test_commands_are_typed_into_one_shell(terminal: Terminal) -> None:
    assert terminal.type("export WORD=hello").problem == ""
    said = terminal.type("echo $WORD; [ -t 1 ] && echo on a terminal")
    assert (said.text, said.code) == ("hello\non a terminal\n", 0)
    assert terminal.type("(exit 3)").problem == "exit code 3"
    assert terminal.type("sleep 100 &").problem == "", (
        "a server in the background is not waited for"
    )


def test_what_follows_for_ever_gets_ctrl_c(terminal: Terminal) -> None:
    watched = terminal.type(ENDLESS)
    assert (watched.code, watched.problem) == (130, "")
    assert watched.text.startswith("first\n")


def test_silence_is_a_problem() -> None:
    assert longest_silence(1.0, [2.0, 7.5], 8.0) == 5.5
    assert longest_silence(1.0, [], 4.0) == 3.0
    assert Typed("pip", 8.0, 5.5, 0, "").problem == "said nothing for 5.5 s"
    assert Typed("pip", 8.0, 4.5, 130, "").problem == "exit code 130"


def test_every_block_of_the_readme_is_typed(tmp_path: Path) -> None:
    commands = list(commands_of((ROOT / "README.md").read_text(), tmp_path))
    assert commands[0] == "scripts/install"
    assert {"dcpd &", ENDLESS, "dcpctl cluster status"} <= set(commands)
    (program,) = tmp_path.iterdir()
    assert f"python {program}" in commands
    assert "from dcpd import" in program.read_text()
