"""Retention: which automatic checkpoints go."""

from __future__ import annotations

import pytest

from workbench.errors import InputError
from workbench.spec.options import TrainOptions
from workbench.spec.retention import remove, superseded

SAVED = [{"step": step, "by_itself": step != 30} for step in range(10, 80, 10)]


@pytest.mark.parametrize(
    ("keep", "keep_every", "gone"),
    [
        (0, 0, []),
        (2, 0, [10, 20, 40, 50]),
        (2, 20, [10, 50]),
        (6, 0, []),
        (9, 10, []),
    ],
)
def test_the_last_ones_stay_and_each_so_manieth_and_those_asked_for(keep, keep_every, gone):
    assert [one["step"] for one in superseded(SAVED, keep, keep_every)] == gone


def test_what_is_removed_is_gone_whole(tmp_path):
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / "rank-0.safetensors").write_text("x")
    remove(tmp_path / "step-10")
    assert list(tmp_path.iterdir()) == []


def test_every_needs_a_last():
    with pytest.raises(InputError, match=r"give keep, such as keep=3, too\."):
        TrainOptions(keep_every=100)
