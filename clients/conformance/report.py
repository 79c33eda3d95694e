"""What came of the checks: lines of text, JSON, JUnit. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from clients.conformance.check import FAIL, NOT_APPLICABLE, OUTCOMES, PASS, REFUSED, Result

SHOWN_PACKETS: Final = 40
"""Packets that text shows of a failed check's exchange, the last ones. JSON and JUnit have all."""
_NOT_IN_XML: Final = {number: None for number in range(32) if chr(number) not in "\t\n\r"}


def text_of(result: Result) -> Iterator[str]:
    """Yield the lines of a result; a failure shows its sentence and its exchange."""
    one = result.check
    said = f" ({result.reason})" if result.reason and result.outcome != FAIL else ""
    yield f"{result.outcome:<8}{one.id:<32}{one.title}{said}"
    if result.outcome != FAIL:
        return
    yield f'        "{one.sentence}" ({one.page})'
    yield f"        {result.reason}"
    left_out = len(result.exchange) - SHOWN_PACKETS
    if left_out > 0:
        yield f"          {left_out} packets before these; -o json has all"
    for line in result.exchange[-SHOWN_PACKETS:]:
        yield f"          {line}"


def counts(results: Iterable[Result]) -> dict[str, int]:
    """Return outcome -> how many checks had it."""
    found = Counter(result.outcome for result in results)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def summary(results: Sequence[Result]) -> str:
    """Return the last line of the text."""
    found = counts(results)
    took_s = sum(result.took_s for result in results)
    parts = ", ".join(f"{number} {outcome}" for outcome, number in found.items())
    return f"{len(results)} checks in {took_s:.1f} s: {parts}"


def document_of(result: Result) -> dict[str, Any]:
    """Return a result as one JSON object."""
    one = result.check
    return {
        "check": one.id, "group": one.group, "outcome": result.outcome, "title": one.title,
        "sentence": one.sentence, "page": one.page, "reason": result.reason or None,
        "seconds": round(result.took_s, 3), "exchange": list(result.exchange),
    }  # fmt: skip


def junit(results: Sequence[Result], server: str) -> str:
    """Return the results as JUnit's XML. What a server refuses, or lacks, is skipped there."""
    found = counts(results)
    suite = ET.Element(
        "testsuite",
        name=f"DCP conformance of {server}",
        tests=str(len(results)),
        failures=str(found[FAIL]),
        skipped=str(found[REFUSED] + found[NOT_APPLICABLE]),
        time=f"{sum(result.took_s for result in results):.3f}",
    )
    for result in results:
        one = result.check
        case = ET.SubElement(
            suite, "testcase", classname=f"conformance.{one.group}", name=one.id,
            time=f"{result.took_s:.3f}",
        )  # fmt: skip
        if result.outcome == FAIL:
            failure = ET.SubElement(case, "failure", message=_xml(result.reason))
            failure.text = _xml("\n".join([one.title, f'"{one.sentence}" ({one.page})',
                                           *result.exchange]))  # fmt: skip
        elif result.outcome != PASS:
            ET.SubElement(case, "skipped", message=_xml(f"{result.outcome}: {result.reason}"))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)


def _xml(text: str) -> str:
    """Return text without what XML cannot hold."""
    return text.translate(_NOT_IN_XML)
