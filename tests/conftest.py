"""What all tests share: how hypothesis runs, how workers share the tests, and a last word on what
did not run.

Being here puts tests/ on the import path, so that `support` can be imported.
"""

import fcntl
import gc
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from vbucket.native.form import problem

# A machine that is busy must not fail a test: examples have no deadline. The same examples in every
# run, unless new ones are asked for: a change is judged by what it changes, not by luck.
settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("random", settings.get_profile("same"), derandomize=False)
# For scripts/mutate: that an example fails is enough, the smallest one is not looked for.
settings.register_profile(
    "mutate", settings.get_profile("same"), phases=(Phase.explicit, Phase.generate)
)
# Not DCPD_...: servers inherit it, and refuse settings that they do not know.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Tests start hundreds of processes. Without bytecode each would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell gives what it starts in the background an ignored SIGINT, which programs inherit. Tests
# type Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER = {"tests/spark": "Spark"}
"""Folders whose tests stay in one worker, because they share what is expensive to make."""
FIRST = (
    "tests/spark", "tests/sim/test_cluster_bugs.py", "tests/system", "tests/cluster_processes",
    "tests/cluster_faults", "tests/cluster_nodes", "tests/benchmarks", "tests/backup",
    "tests/foreign", "tests/console", "tests/test_site.py",
)  # fmt: skip
"""What takes longest begins first, so that all workers end at about the same time."""
GC_THRESHOLDS = (20_000, 20, 50)
LEFT_OUT = pytest.StashKey[int]()
TURN, QUIET = Path(__file__), Path(__file__).with_name("test_project.py")
"""Files to lock, see `quiet`; any would do."""


def pytest_configure(config):
    """Refuse to test what is not the code of the sources, as dcpd does."""
    if stale := problem():
        pytest.exit(f"{stale}; scripts/install test does what its form needs", returncode=4)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_collection_modifyitems(config, items):
    """Put the files in order where workers share them."""
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def pytest_collection_finish():
    """Let the garbage collector pass over what was imported, and look less often: that takes a
    tenth of the simulator's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _place(item):
    return next((at for at, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST))


def pytest_deselected(items):
    """Count what the arguments leave out."""
    config = items[0].config
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give workers whole files, so that what a module shares is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return TOGETHER.get(file.rpartition("/")[0], file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@contextmanager
def locked(path, how):
    with path.open() as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test that is marked `quiet` while the other workers run none."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    how = fcntl.LOCK_EX if item.get_closest_marker("quiet") else fcntl.LOCK_SH
    with QUIET.open() as quiet:
        # Who waits for quiet has the turn meanwhile, so nobody else begins a test.
        with locked(TURN, fcntl.LOCK_EX):
            fcntl.flock(quiet, how)
        return (yield)


def pytest_sessionfinish(session):
    """Tell the parent what this worker has left out; both leave out the same."""
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take what a worker tells."""
    told = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(told, node.config.stash.get(LEFT_OUT, 0))


class FailuresAtOnce:
    """Names a test as soon as it fails: a run takes long, and its summary comes last."""

    def __init__(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)


def pytest_terminal_summary(terminalreporter, config):
    """Name every test that did not run, with its reason; say so when all did."""
    skipped = terminalreporter.stats.get("skipped", [])
    deselected = config.stash.get(LEFT_OUT, 0)
    terminalreporter.section("what did not run", sep="-")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"did not run: {report.nodeid}: {reason}")
    if deselected:
        terminalreporter.line(f"did not run: {deselected} tests that the arguments leave out")
    if not skipped and not deselected:
        terminalreporter.line("nothing: every collected test ran")
