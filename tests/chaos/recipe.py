"""The training that storms go over: small, of double precision, and dying where it is told to.

Double, because over a thousand steps single precision alone would tell the curves apart.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.contract import batteries
from workbench.engine import recipe as recipes
from workbench.spec.options import TrainOptions

WHERE = ("forward", "loss", "backward", "before the step", "after the step")
HOW = {
    "kill": "os.kill(os.getpid(), 9)",
    "exit": "os._exit(3)",
    "segfault": "os.kill(os.getpid(), 11)",
    "abort": "os.abort()",
}
STRIKE = """
BLOCKS, DROP = 3, 0.1
import os, signal

def strike(where):
    path = AIM + "/" + str(os.getpid())
    if os.path.exists(path):
        with open(path) as file:
            there, code = file.read().split(": ")
        if there == where:
            os.remove(path)
            exec(code)
"""
LOSS = """
    if output.requires_grad:
        strike("loss")
        output.register_hook(lambda _: strike("backward"))
    return F.cross_entropy"""
OPTIMIZER = """
class Stricken(torch.optim.SGD):
    def step(self, *args, **how):
        strike("before the step")
        found = super().step(*args, **how)
        strike("after the step")
        return found

def evaluate(model):
    ids, target = data()
    return {"accuracy": float((model(ids).argmax(-1) == target).double().mean())}

def optimizer(params):
    return Stricken(params, lr=0.1, momentum=0.9)
"""


def cell(aim: Path) -> str:
    """The recipe's text; aim: the directory in which processes find what they are told."""
    text = batteries.GPT.replace("return Net()", "return Net().double()")
    text = text.replace(
        "        n, t, _ = x.shape", '        strike("forward")\n        n, t, _ = x.shape'
    )
    text = text.replace("\n    return F.cross_entropy", LOSS)
    text = text[: text.index("def optimizer")]
    return f"AIM = {str(aim)!r}{STRIKE}{text}{OPTIMIZER}"


def tell(aim: Path, pid: int, where: str, how: str) -> Path:
    """Have a process die at a place of its next steps -> a file that is gone once it does."""
    path = aim / str(pid)
    partial = path.with_suffix(".partial")
    partial.write_text(f"{where}: {HOW[how]}")
    partial.rename(path)
    return path


class Yardstick:
    """The losses of one plain process, as many as are asked for."""

    def __init__(self, aim: Path) -> None:
        namespace: dict = {}
        exec(cell(aim), namespace)
        self._recipe = recipes.from_namespace(namespace)
        self._losses: list[float] = []

    def __call__(self, num_steps: int) -> list[float]:
        if num_steps > len(self._losses):
            found = batteries.plain(self._recipe, 2 * num_steps, TrainOptions())
            self._losses = [loss for loss, _ in found]
        return self._losses[:num_steps]


def kill(pid: int) -> None:
    """SIGKILL; that it is gone already is as well."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
