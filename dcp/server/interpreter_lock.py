"""How threads share the interpreter with the event loop. Called once, before threads start.

The thread that writes the log needs the interpreter lock after each system call. A thread asks for
the lock when its wait of a switch interval has timed out. Each release of the lock begins the wait
again, and a loop that serves single requests releases it every 20 to 30 us. So with a longer
interval the thread never asks. It got the lock by luck, and a commit took up to 190 ms beside one
client that read in turn (docs/decisions.md).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 0.000_02
"""Shorter than a turn of the loop. With 10 us a server under load made 4 % fewer writes."""
TIMER_SLACK_NS: Final = 1
"""By how much Linux may prolong a wait, to wake up less often. Its default of 50 us is longer than
the interval. New threads and processes inherit it."""
_PR_SET_TIMERSLACK: Final = 29


def share_quickly() -> None:
    """Make the loop give way to a thread that waits for the lock."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
