"""%dist_stacks, %dist_interrupt and %dist_replace in a real kernel."""

from __future__ import annotations

import re

import pytest
from kernel import Kernel

from tests.driver.test_run import CELL

RECIPE = CELL.format(fault="while rank == 1 and calls == 9: pass")
STANDS = """
import time
deadline_s = time.monotonic() + 30
while not any(event.get("name") == "busy_awaited" for event in run.events):
    assert time.monotonic() < deadline_s
    time.sleep(0.01)
"""


def test_a_loop_is_looked_at_ended_and_the_training_goes_on(engines: Kernel):
    assert engines(f"%%dist_train --steps 20\n{RECIPE}").status == "ok"
    assert (
        engines(
            "run = %dist_panel ;\nfrom workbench.driver import current\nrun = current.run()"
        ).status
        == "ok"
    )
    assert engines(STANDS).status == "ok"
    reply = engines("%dist_stacks")
    assert "Rank 1 (forward of step 9 for" in reply.text
    assert "in loss" in next(line for line in reply.text.splitlines() if line.startswith("> "))
    assert "all-reduce not done)" in reply.text
    title, *calls = next(
        part.splitlines() for part in reply.text.split("\nRank") if "1 (forward" in part
    )
    assert re.search(r": cell \d+, line \d+, in loss$", title)
    assert not any(call.startswith("  /") for call in calls)
    assert any(call.startswith("  workbench/engine/trainer.py:") for call in calls)
    assert "<b>cell " in engines("%dist_stacks 1").displays[0]["text/html"]
    assert engines("%dist_interrupt").out == "Ranks 0-1 interrupted.\n"
    ended = "while run.state == 'running': time.sleep(0.01)\nprint(run.step_now, run.message)"
    assert "8 Rank 1: interrupted at step 9 (cell " in engines(ended).out
    assert engines("%%dist\ncalls += 10").status == "ok"
    assert engines("%dist_resume ;\nprint(run.wait(30)['state'])").out == "finished\n"
    assert engines("%dist_interrupt").out == "Nothing was under way.\n"
    assert "Ranks 0-1: idle" in engines("%dist_stacks").text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%dist_stacks 7", "InputError: There is no rank 7: use 0 to 1."),
        ("%dist_interrupt x", "use numbers and spans such as 0,2 or 0-3, or all."),
        ("%dist_replace", "UsageError: %dist_replace: rank is missing: %dist_replace rank."),
        ("%dist_replace 2", "InputError: There is no rank 2: use 0 to 1."),
    ],
)
def test_what_is_asked_amiss_is_one_sentence(engines: Kernel, line: str, says: str):
    reply = engines(line)
    assert says in (reply.error or reply.err)
    assert len((reply.error or reply.err).splitlines()) == 1


def test_a_rank_is_killed_by_its_number(engines: Kernel):
    engines("pid = current.engines().status()[1]['pid']")
    assert engines("%dist_replace 1\nprint(pid)").out.startswith("Rank 1 (process ")
    engines("%dist_stop ;")
