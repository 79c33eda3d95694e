"""Runs the shell blocks of a page as a reader would: pasted as they are into one clean bash.

The shell has a network of its own (loopback only), so the pages may use the default ports whatever
else runs on the machine. Its folder is a fresh copy of the project, without a data folder. Between
two blocks the shell waits, as a reader does, until a `dcpd ... &` says that it is ready.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = frozenset({"sh", "bash", "shell", "console"})
NOT_RUN_MARK = "not-run"
FILE_NAME = re.compile(r"# ([\w-]+\.py)\n")
SERVER = re.compile(r"^dcpd .*&$|^dcpd &$", re.MULTILINE)
ENDLESS = "dcpctl watch"
"""A command that follows for ever. It is interrupted after its first line, as with Ctrl-C."""
FIRST_EVENT = "#1 set "
READY = "\n  try "
LIMIT_S = 20


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    mark: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.strip().splitlines()[0]

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS


def pages() -> list[Path]:
    """All pages of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for info, text in BLOCK.findall(page.read_text()):
        language, _, mark = info.strip().partition(" ")
        found.append(Block(str(page.relative_to(ROOT)), language, mark, text))
    return found


def can_have_own_network() -> bool:
    """Whether this user may create a network namespace and bring its loopback up."""
    words = [*own_network(), "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def own_network() -> list[str]:
    """The words in front of a command that give it a loopback interface of its own."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    start = 'ip link set lo up && exec "$0" "$@"'
    return ["unshare", *user, "--net", "bash", "--noprofile", "--norc", "-c", start]


def copy_project(folder: Path) -> None:
    """Copy the files under version control, with the environment beside them as a link."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])


class CleanShell:
    """One bash; `paste` gives it a block and returns what it printed."""

    def __init__(self, folder: Path) -> None:
        copy_project(folder)
        self._folder = folder
        self._pasted = 0
        environment = {
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
        }
        self._bash = subprocess.Popen(
            [*own_network(), "bash", "--noprofile", "--norc"],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._unread = ""

    def paste(self, block: Block) -> str:
        """Run a block. AssertionError if one of its commands fails."""
        self._pasted += 1
        script = self._folder / f".block-{self._pasted}.sh"
        script.write_text(block.text)
        end = f"end of block {self._pasted}:"
        lines = f"""failed=; trap 'failed+="[$BASH_COMMAND] "' ERR
. {script}
trap - ERR; echo; echo "{end} $failed."
"""
        assert self._bash.stdin is not None
        self._bash.stdin.write(lines.encode())
        self._bash.stdin.flush()
        output = ""
        if ENDLESS in block.text.splitlines():
            output += self._read_until(FIRST_EVENT) + self._read_until("\n")
            self._interrupt(ENDLESS)
        output += self._read_until(end)
        failed = self._read_until("\n").strip().removesuffix(".").strip()
        for _ in range(len(SERVER.findall(block.text)) - output.count(READY)):
            output += self._read_until(READY)
        if failed.startswith(f"[{ENDLESS}]"):  # then the block has the same exit code
            failed = failed.removeprefix(f"[{ENDLESS}]").replace(f"[. {script}]", "").strip()
        assert not failed, f"{block.page}: failed: {failed}\n{output}"
        return output

    def _interrupt(self, command: str) -> None:
        """Send Ctrl-C's signal to the command that the shell runs now."""
        children = Path(f"/proc/{self._bash.pid}/task/{self._bash.pid}/children").read_text()
        for child in children.split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if command.rsplit(maxsplit=1)[-1].encode() in words:
                os.kill(int(child), signal.SIGINT)

    def _read_until(self, mark: str) -> str:
        """Read the output up to and with a mark; return what is before it."""
        stdout = self._bash.stdout
        assert stdout is not None
        deadline = time.monotonic() + LIMIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while mark not in self._unread:
                left = deadline - time.monotonic()
                is_more = left > 0 and bool(selector.select(left))
                assert is_more, f"no {mark!r} in: {self._unread}"
                data = os.read(stdout.fileno(), 1 << 16)
                assert data, f"the shell ended: {self._unread}"
                self._unread += data.decode(errors="replace")
        before, _, self._unread = self._unread.partition(mark)
        return before

    def close(self) -> None:
        """End the shell and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGTERM)
        try:
            self._bash.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._bash.pid, signal.SIGKILL)
            self._bash.communicate()


def programs(blocks: list[Block]) -> Iterator[tuple[str, str]]:
    """The Python blocks that say which file they are: name and text."""
    for block in blocks:
        named = FILE_NAME.match(block.text)
        if block.language == "python" and named is not None:
            yield named[1], block.text
