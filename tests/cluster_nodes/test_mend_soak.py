"""A small part of `scripts/soak mend`: damages of one copy under load."""

from __future__ import annotations

from pathlib import Path

from tests.soak.mend import MENDED_ALWAYS, soak


async def test_damages_of_one_copy_under_load(tmp_path: Path) -> None:
    tally = await soak(tmp_path, damages=8, seed=6)
    assert tally.mistakes() == []
    mended = {place for (_, place, result) in tally.results if result == "mended"}
    assert mended >= MENDED_ALWAYS, tally.table()
    assert tally.reads > 100
