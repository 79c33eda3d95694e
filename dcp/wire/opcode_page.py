"""Generates docs/commands.md from the opcode table and the status table.

`python -m dcp.wire.opcode_page` writes the page to stdout. A test checks that the page is current.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.opcode import OPCODES, QUIET_FORMS, OpGroup
from dcp.wire.status import ERROR_TABLE

TITLES: Final[dict[OpGroup, str]] = {
    OpGroup.SESSION: "Session",
    OpGroup.DOCUMENT: "Documents",
    OpGroup.SUBDOC: "Sub-documents and XATTRs",
    OpGroup.PARTITION: "Partitions and their history",
    OpGroup.COLLECTION: "Collections",
    OpGroup.DCP: "Change streams (DCP)",
}

HEAD: Final = """# Commands of the binary protocol

Generated from the tables in `dcp/wire` by `python -m dcp.wire.opcode_page`; do not edit.

A packet has a 24-byte header and a body: framing extras, extras, key, value. All numbers are
big-endian.

| bytes | request | response |
|---|---|---|
| 0 | magic 0x80 (0x08: flex) | 0x81 |
| 1 | opcode | same opcode |
| 2-3 | key length (flex: framing length, key length) | key length |
| 4 | extras length | extras length |
| 5 | datatype (0x01 JSON, 0x04 XATTR) | datatype |
| 6-7 | vbucket | status |
| 8-11 | body length | body length |
| 12-15 | opaque, any four bytes | same opaque |
| 16-23 | CAS | CAS |

Quiet changes answer only errors, quiet reads only hits. Unknown opcodes get status 0x81.

In a partition with replicas, a change that was applied gets SYNC_WRITE_AMBIGUOUS if it is not
committed in time, or if the node is no longer the partition's master. That includes quiet changes.
A read that waited for such a change gets ETMPFAIL: ask again. The text protocol has `SERVER_ERROR`
lines instead; commands with `noreply` get no answer.
"""


def markdown() -> str:
    """Return the page."""
    lines = [HEAD]
    quiet = {loud: form for form, loud in QUIET_FORMS.items()}
    for group, title in TITLES.items():
        lines += [f"## {title}", "", "| opcode | name | quiet | extras | body | what it does |"]
        lines.append("|---|---|---|---|---|---|")
        for opcode, spec in OPCODES.items():
            if spec.group != group or opcode in QUIET_FORMS:
                continue
            form = f"0x{quiet[opcode]:02x}" if opcode in quiet else ""
            lines.append(
                f"| 0x{opcode:02x} | {opcode.name} | {form} | {spec.extras} | {spec.body} "
                f"| {spec.meaning} |"
            )
        lines.append("")
    lines += ["## Statuses", "", "| status | name | meaning | attributes |", "|---|---|---|---|"]
    for status, (name, text, attributes) in ERROR_TABLE.items():
        lines.append(f"| 0x{status:02x} | {name} | {text} | {', '.join(attributes)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
