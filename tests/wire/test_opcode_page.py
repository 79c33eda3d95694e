from __future__ import annotations

from pathlib import Path

from dcp.wire.opcode import OPCODES, QUIET_FORMS
from dcp.wire.opcode_page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_of_commands_is_current() -> None:
    assert PAGE.read_text() == markdown(), "python -m dcp.wire.opcode_page > docs/commands.md"


def test_every_opcode_is_on_the_page() -> None:
    page = markdown()
    for opcode in OPCODES:
        place = f"| 0x{opcode:02x} |"
        assert place in page or (opcode in QUIET_FORMS and f"0x{opcode:02x}" in page)
