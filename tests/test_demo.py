"""`make demo`: every phase, the table, and one sentence for what cannot be done."""

from __future__ import annotations

import pytest
from clusters import Clusters

from workbench import demo

PHASES = ("start", "train", "save", "restore", "stop")


def test_the_demo_trains_and_prints_a_line_a_phase_and_a_table(
    clusters: Clusters, capfd: pytest.CaptureFixture[str]
):
    # `clusters` keeps the fork server, which makes the demo's own start a warm one.
    assert demo.main(["-n", "2", "--steps", "40"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(PHASES)]] == list(PHASES)
    rows = dict(line.rsplit(maxsplit=1) for line in lines[len(PHASES) + 1 :])
    assert float(rows["loss, last step"]) < float(rows["loss, first step"])
    assert float(rows["test accuracy"].rstrip("%")) > 50
    assert rows["saves"] == "1"
    assert "-" not in rows.values()


def test_no_rank_is_one_sentence(clusters: Clusters, capfd: pytest.CaptureFixture[str]):
    assert demo.main(["-n", "0"]) == 1
    said = capfd.readouterr().err
    assert "0" in said
    assert "Traceback" not in said
