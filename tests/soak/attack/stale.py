"""The kind `stale page`: the disk has lost the write of one page of the store's file.

The page holds what it held some merges ago, and is sound in itself. What holds for any damage holds
here: each answer is right or refused, and `dcpctl verify` names what is refused.
"""

from __future__ import annotations

from typing import Final

from tests.soak.attack.case import Case, Fault
from tests.soak.attack.damage import CASES_PER_FOLDER, DATA, attack
from tests.soak.attack.folders import MadeFolder
from tests.soak.attack.harm import PAGE_BYTES, Harm

METAS: Final = 2
"""The first pages: one of them that goes back is an older store."""
_SAME_BYTES: Final = 12
"""Number and type of a page."""


def run(case: Case) -> None:
    made = case.share("folder", CASES_PER_FOLDER, MadeFolder)
    damaged = made.copy(case.folder / "damaged")
    path = damaged / DATA
    data = path.read_bytes()
    stale = {
        at: (then, merge)
        for merge, older in enumerate(made.older)
        for at in range(METAS * PAGE_BYTES, len(older), PAGE_BYTES)
        if (then := older[at : at + PAGE_BYTES]) != (now := data[at : at + PAGE_BYTES])
        and then[:_SAME_BYTES] == now[:_SAME_BYTES]
    }
    case.demand(stale, Fault.BROKEN, "no page was written twice: nothing can be outdated")
    at = case.draw.choice(sorted(stale))
    then, merge = stale[at]
    path.write_bytes(data[:at] + then + data[at + PAGE_BYTES :])
    case.note(f"{made.words}: page {at // PAGE_BYTES} as after merge {merge + 1}")
    attack(case, made, damaged, Harm(DATA, "old", at, PAGE_BYTES))
