"""What is wrong with a command as it was typed is told at once, whatever the ranks are in."""

from __future__ import annotations

import time

import pytest

from tests.driver.test_rescue import wait_until
from workbench.errors import WorkbenchError


def test_a_wrong_word_is_refused_while_a_step_still_lasts(clusters, tmp_path):
    run = clusters(2).train("digits", steps=10**6, directory=tmp_path)
    run.inject("stall", rank=1, for_s=4.0)
    wait_until(lambda: "struck" in [row["state"] for row in run.faults.rows()])
    begun_s = time.monotonic()
    for verb, how, says in (
        ("inject", {"kind": "kil"}, "Did you mean 'kill'"),
        ("inject", {"kind": "kill", "rank": 9}, "ranks 0 to 1 train"),
        ("inject", {"kind": "stall", "for_s": 1e30}, "86,400 at most"),
        ("inject", {"kind": "kill", "at_step": 10**30}, "at most"),
        ("policy", {"on_loss": "pray"}, "replace"),
        ("recover", {"how": "somehow"}, "use replace or shrink"),
        ("resume", {"steps": 0}, "whole number of steps"),
        ("step", {"n": "two"}, "whole number of steps"),
        ("switch", {"strategy": "pipline"}, "pipeline"),
        ("profile", {"path": "here.txt"}, "json"),
    ):
        with pytest.raises(WorkbenchError, match=says):
            run.ask(verb, **how).result(0)  # by now, though no slice ends
    assert time.monotonic() - begun_s < 4.0
    run.clear_faults()
    run.stop()
