"""What is too large is refused before it is sent, by name and line."""

from __future__ import annotations

from dcp.wire.frame import MAX_VALUE_BYTES


def test_a_value_over_the_limit(ctl):
    code, out, err = ctl("set", "large", "-", stdin=bytes(MAX_VALUE_BYTES + 1))
    assert (code, out) == (1, b"")
    assert "the value has 20971521 bytes, and the limit is 20971520 (20 MiB)" in err
    assert "nothing was sent" in err
    assert ctl("get", "large")[0] == 3


def test_a_row_over_the_limit_is_named_by_its_line(ctl):
    lines = b'{"id": "small"}\n{"id": "large", "text": "' + b"x" * MAX_VALUE_BYTES + b'"}\n'
    code, _, err = ctl("import", "-", "--key", "id", stdin=lines)
    assert code == 1
    assert "standard input, line 2: set: the value has" in err
