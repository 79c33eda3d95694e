"""Types README's blocks into a terminal, as a newcomer would: scripts/first-minutes."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
SILENCE_MAX_S: Final = 5.0
COMMAND_MAX_S: Final = 400.0
BLOCK: Final = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT: Final = re.compile(rb"<<ready (\d+)>>")
"""What bash prints when a command is done, with its exit code."""
ENDLESS: Final = "dcpctl watch"
"""It follows until Ctrl-C, which is typed a second after its first line."""
INTERRUPTED: Final = 130
FIRST_KEY: Final = "dcpctl set"
PORTS: Final = (11210, 8091, 11220, 8101)
"""Of the server, and of the second one in README's cluster."""


class Typed(NamedTuple):
    """A command that was typed. `silence_s`: the longest time without a word while it ran."""

    command: str
    took_s: float
    silence_s: float
    code: int
    text: str

    @property
    def problem(self) -> str:
        """What is wrong with it, "" if nothing is."""
        if self.code not in {0, INTERRUPTED if self.command == ENDLESS else 0}:
            return f"exit code {self.code}"
        if self.silence_s > SILENCE_MAX_S:
            return f"said nothing for {self.silence_s:.1f} s"
        return ""


def longest_silence(began_s: float, said_s: Iterable[float], ended_s: float) -> float:
    """Return the longest time between two outputs, the beginning and the end included."""
    times = [began_s, *said_s, ended_s]
    return max(after - before for before, after in pairwise(times))


class Terminal:
    """A bash on a terminal of its own. `type` gives it a line, as a person does. A command that is
    not over after `limit_s` is an error.
    """

    def __init__(
        self, folder: Path, environment: dict[str, str], limit_s: float = COMMAND_MAX_S
    ) -> None:
        self._limit_s = limit_s
        self._pid, self._fd = pty.fork()
        if not self._pid:
            os.chdir(folder)
            words = ["bash", "--noprofile", "--norc", "-i"]
            os.execvpe("bash", words, environment | {"PS1": "<<ready $?>>", "PS2": ""})
        self._text = b""
        self._wait_for_prompt()
        self.type("stty -echo; bind 'set enable-bracketed-paste off'")

    def type(self, command: str) -> Typed:
        """Type a line and wait for the prompt. Raises TimeoutError."""
        self._text = b""
        began_s = time.monotonic()
        os.write(self._fd, command.encode() + b"\n")
        if command == ENDLESS:
            self._read(self._limit_s)
            time.sleep(1.0)
            os.write(self._fd, b"\x03")
        code, said_s = self._wait_for_prompt()
        ended_s = time.monotonic()
        text = PROMPT.sub(b"", self._text).decode(errors="replace").replace("\r", "")
        silence_s = longest_silence(began_s, said_s, ended_s)
        return Typed(command, ended_s - began_s, silence_s, code, text)

    def _wait_for_prompt(self) -> tuple[int, list[float]]:
        said_s = []
        give_up_s = time.monotonic() + self._limit_s
        while (prompt := PROMPT.search(self._text)) is None:
            self._read(give_up_s - time.monotonic())
            said_s.append(time.monotonic())
        return int(prompt[1]), said_s

    def _read(self, limit_s: float) -> None:
        if not select.select([self._fd], [], [], max(limit_s, 0.0))[0]:
            raise TimeoutError(f"no prompt came: {self._text.decode(errors='replace')[-2000:]}")
        self._text += os.read(self._fd, 65536)

    def close(self) -> None:
        """End what runs in the terminal, and the terminal."""
        self.type("kill $(jobs -p) 2>/dev/null; wait")
        os.kill(self._pid, signal.SIGHUP)
        os.close(self._fd)
        os.waitpid(self._pid, 0)


def commands_of(readme: str, folder: Path) -> Iterator[str]:
    """Yield README's commands, line by line. A block of Python becomes a program in the folder."""
    for number, (language, text) in enumerate(BLOCK.findall(readme)):
        if language == "python":
            program = folder / f"block-{number}.py"
            program.write_text(text)
            yield f"python {program}"
        else:
            yield from filter(None, text.splitlines())


def taken_ports() -> list[int]:
    """Return those of README's ports on which something listens."""
    taken = []
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    return taken


def newcomer(folder: Path) -> dict[str, str]:
    """Return the environment of somebody who has just come: an empty HOME, and no cache of pip."""
    own = {"HOME": str(folder / "home"), "PIP_CACHE_DIR": str(folder / "pip-cache")}
    for path in own.values():
        Path(path).mkdir()
    left_out = ("DCPD_", "DCPCTL_", "PYTHON", "VIRTUAL_ENV", "XDG_", "UV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | own | {"TERM": "xterm", "LANG": "C.UTF-8"}


def show(typed: Typed) -> None:
    """Print a line for a command, and all of its output if something is wrong."""
    print(f"{typed.took_s:7.1f} s {typed.silence_s:6.1f} s  {typed.command}", flush=True)
    if typed.problem:
        print(f"{typed.text}\n{'':18}^ {typed.problem}", flush=True)


def first_minutes(folder: Path, more: list[str]) -> list[str]:
    """Clone into a folder and type everything; return what is wrong."""
    began_s = time.monotonic()
    clone = folder / "dcpd"
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", str(clone)], check=True)
    terminal = Terminal(clone, newcomer(folder))
    problems = []
    print(f"{'time':>9} {'silence':>8}  command")
    try:
        for command in [*commands_of((clone / "README.md").read_text(), folder), *more]:
            typed = terminal.type(command)
            show(typed)
            problems += [f"{command}: {typed.problem}"] if typed.problem else []
            if command.startswith(FIRST_KEY) and began_s:
                print(
                    f"{time.monotonic() - began_s:7.1f} s           from the clone to the first key"
                )
                began_s = 0.0
    finally:
        terminal.close()
    left = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    ).stdout
    return problems + ([f"left in the clone:\n{left}"] if left else [])


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/first-minutes", description=__doc__)
    parser.add_argument("--demo", action="store_true", help="also scripts/demo")
    parser.add_argument("--docs", action="store_true", help="also scripts/docs --build")
    options = parser.parse_args()
    if taken := taken_ports():
        print(
            f"something listens on the ports {taken}, which README uses: stop it", file=sys.stderr
        )
        return 2
    more = ["scripts/demo"] * options.demo + ["scripts/docs --build"] * options.docs
    folder = Path(tempfile.mkdtemp(prefix="dcpd-first-minutes-"))
    try:
        problems = first_minutes(folder, more)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(problems) or "nothing failed, nothing was silent, and the clone is clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
