"""docs/conformance-scenarios.md: what scenarios do to consumers."""

from __future__ import annotations

from typing import Final

from clients.conformance.consumers import suite  # it fills the table
from clients.conformance.consumers.scenario import SCENARIOS

HEAD: Final = """# Scenarios for consumers

Generated from the code by `scripts/pages`; do not edit.
[conformance.md](conformance.md#judge-a-consumer) says how they are played. Each has a server of its
own (those on a cluster share three nodes), and ends when the consumer has what the server has.
"""
_ABOUT: Final = {
    "rollback": "History branches, or the consumer's place in it is gone.",
    "stream": "Streams end, are refused, or stand still.",
    "network": "Connections break, are slow, or say nothing.",
    "contents": "What streams carry.",
    "cluster": "Three nodes.",
}


def markdown() -> str:
    """Return the page: a section for each group, and in it one for each scenario."""
    assert suite.MODULES
    lines = [HEAD]
    for group, about in _ABOUT.items():
        lines += [f"## {group}", "", about, ""]
        for each in SCENARIOS.values():
            if each.group == group:
                lines += [f"### {each.name}", "", f"*{each.title}*", "", each.page, ""]
    return "\n".join(lines).rstrip() + "\n"
