"""Ranks as text."""

from __future__ import annotations

import pytest

from workbench.errors import InputError
from workbench.spec.ranks import parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("all", None), ("0", [0]), ("0,2", [0, 2]), ("0-3", [0, 1, 2, 3]), ("4, 1-2,2", [1, 2, 4])],
)
def test_numbers_and_spans(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "-1", "3-1", "0-", "1.5", "0,,1", "0-999999999"])
def test_what_names_no_ranks_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="such as 0,2 or 0-3, or all"):
        parse_ranks(text)
