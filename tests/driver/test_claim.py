"""Notebooks that attach to one cluster at the same moment: one does, the others are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.driver.test_attach import SLOW, left  # noqa: F401 - a fixture

# Each line that comes is an expression; an answer goes back in one line.
KERNEL = """
import json, sys, time
from workbench.driver.attach import attach_to
from workbench.driver.clusters import chosen
from workbench.driver.watching import watch
from workbench.errors import WorkbenchError
print('"here"', flush=True)
for line in sys.stdin:
    began_s = time.monotonic()
    try:
        told = {"value": eval(line)}
    except WorkbenchError as error:
        told = {"error": str(error)}
    print(json.dumps({**told, "s": time.monotonic() - began_s}), flush=True)
"""
CHOOSE = "[cluster := chosen(None)][0].name"
ATTACH = "[engines := attach_to(cluster, take_over={take_over})][0].run.step_now"


class Kernel:
    """A process in the place of a kernel."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.answer() == "here"

    def send(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, expression: str) -> Any:
        self.send(expression)
        return self.answer()["value"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def kernels() -> Iterator[list[Kernel]]:
    made: list[Kernel] = []
    yield made
    for one in made:
        if one.process.poll() is None:
            one.kill()


def at_once(kernels: list[Kernel], *, take_over: bool) -> Kernel:
    """Both of two attach at the same moment -> the one that has."""
    for one in kernels:
        assert one.ask(CHOOSE)
    for one in kernels:
        one.send(ATTACH.format(take_over=take_over))
    told = {one: one.answer() for one in kernels}
    winners = [one for one in kernels if "value" in told[one]]
    assert len(winners) == 1, told
    (loser,) = (told[one] for one in kernels if one is not winners[0])
    pid = winners[0].process.pid
    is_attaching = rf"The notebook of process {pid} is just attaching to \S+: %dist_attach watches"
    has_it = rf"\S+ is controlled by the notebook of process {pid}, which lives"
    assert re.match(f"{is_attaching}|{has_it}", loser["error"]), loser
    return winners[0]


@pytest.mark.parametrize("take_over", [False, True])
def test_of_two_that_attach_at_the_same_moment_one_does(left, kernels, take_over):  # noqa: F811
    first = left(SLOW, steps=1_000_000, then="while run.step_now < 20: time.sleep(0.01)")
    first.wait()
    kernels += [Kernel(), Kernel()]
    if not take_over:
        first.kill()
    winner = at_once(kernels, take_over=take_over)
    loser = next(one for one in kernels if one is not winner)
    # It may watch, and take over in its turn from one that was killed.
    assert loser.ask("watch().name")
    winner.kill()
    loser.ask(CHOOSE)
    assert loser.ask(ATTACH.format(take_over=False)) >= 20
    assert loser.ask("engines.run.pause() == len(engines.run.history.steps)") is True
