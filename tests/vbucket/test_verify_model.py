"""The offline check finds nothing wrong with a store after any merges, branches and compactions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant
from test_compaction import CompactionMachine
from test_merge import VB_IDS

from memory.log_device import SegmentsOf
from vbucket.check.store_check import StoreCheck


class CheckedMachine(CompactionMachine):
    """What a compaction machine does, and a check after each step."""

    @invariant()
    def the_check_finds_nothing(self) -> None:
        device = self.writer.device
        check = StoreCheck(self.env.snapshot(), SegmentsOf(device), vb_ids=VB_IDS, slice_keys=4)
        assert [found for found in check.findings() if not found.is_harmless] == []


TestChecked = CheckedMachine.TestCase
TestChecked.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
