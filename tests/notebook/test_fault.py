"""%dist_fault in a kernel."""

from __future__ import annotations

import pytest
from kernel import Kernel

from workbench.errors import InputError
from workbench.notebook.magics.fault import seconds
from workbench.spec.fault import kinds


def test_a_fault_is_listed_strikes_and_is_cleared(engines: Kernel):
    assert engines("%dist_fault").error.startswith("RunError: Nothing has been trained yet")
    engines("run = %dist_train digits --steps 100000 --on-nan skip;\nrun.pause()")
    assert engines("%dist_fault").text == "No faults yet."
    table = engines("%dist_fault slow --rank 1 --for 20ms").text
    assert table.splitlines()[0] == "Faults: 1, waiting for a step: 1"
    assert table.splitlines()[2].split()[:2] == ["slow", "1"]
    engines("%dist_step 2")
    assert "lasts until it is cleared" in engines("%dist_fault").text
    assert "fault injected: slow of rank 1" in engines("print(run.events)").out
    assert "cleared" in engines("%dist_fault clear").text


@pytest.mark.parametrize("line", ["lunch", "kill --rank 9", "stall --for soon"])
def test_what_cannot_be_is_refused_in_one_sentence(engines: Kernel, line: str):
    engines("%dist_train digits --steps 0;")
    reply = engines(f"%dist_fault {line}")
    assert reply.error.startswith("InputError: ")
    assert "\n" not in reply.error


def test_help_has_all_kinds(kernel: Kernel):
    text = kernel("%dist_fault -h").out
    assert all(kind in text for kind in kinds())


@pytest.mark.parametrize(
    ("text", "found"), [("5s", 5.0), ("200ms", 0.2), ("0.5", 0.5), ("2min", 120.0), (None, None)]
)
def test_times_are_read(text, found):
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "s", "5 apples", "-1s"])
def test_others_are_none(text):
    with pytest.raises(InputError, match="--for"):
        seconds(text)
