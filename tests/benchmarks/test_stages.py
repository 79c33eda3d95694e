"""benchmarks.stages samples functions by name: a name that is gone must not count as 0 ms."""

from __future__ import annotations

import pytest

from benchmarks.stages import STAGES, sampled_name


def test_each_stage_is_a_function_that_there_is() -> None:
    assert [sampled_name(function).count(".") for _, function in STAGES] == [1] * len(STAGES)


def test_a_renamed_function_ends_the_benchmark_with_words() -> None:
    with pytest.raises(SystemExit, match=r"no Session\.take_bytes in dcp\.session\.session"):
        sampled_name("dcp.session.session:Session.take_bytes")
