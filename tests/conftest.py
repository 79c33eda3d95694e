"""What all tests share: how hypothesis runs, and a last word on what did not run.

Being here puts tests/ on the import path, so that `support` can be imported.
"""

import os

from hypothesis import settings

# A machine that is busy must not fail a test: examples have no deadline. The same examples in every
# run, unless new ones are asked for: a change is judged by what it changes, not by luck.
IS_RANDOM = os.environ.get("DCPD_TEST_RANDOM") == "1"
settings.register_profile("dcpd", deadline=None, print_blob=True, derandomize=not IS_RANDOM)
settings.load_profile("dcpd")


def pytest_terminal_summary(terminalreporter):
    """Name every test that did not run, with its reason; say so when all did."""
    skipped = terminalreporter.stats.get("skipped", [])
    deselected = len(terminalreporter.stats.get("deselected", []))
    terminalreporter.section("what did not run", sep="-")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"did not run: {report.nodeid}: {reason}")
    if deselected:
        terminalreporter.line(f"did not run: {deselected} tests that the arguments leave out")
    if not skipped and not deselected:
        terminalreporter.line("nothing: every collected test ran")
