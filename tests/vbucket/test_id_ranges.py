"""Sets of partitions as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbucket.model.ids import id_ranges, ids_in


def test_ranges_are_short() -> None:
    assert id_ranges([9, 0, 1, 2, 4, 4]) == "0-2,4,9"
    assert id_ranges([]) == ""


@given(st.sets(st.integers(0, 1023)))
def test_the_text_is_read_back(vb_ids: set[int]) -> None:
    assert ids_in(id_ranges(vb_ids)) == vb_ids


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        ids_in("1-x")
