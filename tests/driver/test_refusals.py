"""Refusals on real ranks: what the sentence says to type is accepted, by a switch and at the start.

What the limits can say beforehand is walked over in tests/spec/test_advice.py.
"""

from __future__ import annotations

import re

import pytest

from workbench.errors import LayoutError

CELL = """
import torch
from torch import nn
batch, seed = 13, 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))

class Sorts(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        order = x.argsort(1)
        for layer in list(self)[1:-1]:
            x = layer(x)
        return self[-1](x.gather(1, order))

class Mean(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x.square().mean()

def linears(number):
    return [nn.Linear(12, 12) for _ in range(number)]

def tied():
    layers = linears(8)
    layers[4].weight = layers[0].weight
    return nn.Sequential(*layers)

def model(): return MODEL
def data():
    x = torch.randn(64, 3, 12, generator=torch.Generator().manual_seed(1))
    return x, x.sum(2, keepdim=True)
def loss(output, target):
    value, more = output if isinstance(output, tuple) else (output, 0.0)
    return nn.functional.mse_loss(value.mean(2, keepdim=True), target) + more
def optimizer(params): return torch.optim.SGD(params, lr=0.02)
"""
CASES = {
    "three heads": ("nn.Sequential(Block(), Block())", "tp2", {}, "not divide the 3 heads of 0"),
    "three layers": (
        "nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 12))",
        "model",
        {},
        r"the model has 3 parts .* Use the layout \"pp3\" \(3 of 4 ranks\) or \"pp2 dp2\"\.$",
    ),
    "one degree of three": ("nn.Sequential(*linears(4))", "hybrid", {"pp": 3}, "divide 4 ranks"),
    "an option of hybrid": ("nn.Sequential(*linears(4))", "pipeline", {"pp": 3}, "where pp=3 does"),
    "no pair": ("nn.Sequential(nn.Linear(12, 1))", "model", {"by": "tensor"}, "No two linear"),
    "few places": ("Sorts(*linears(8))", "pp2 dp2, zbv x2", {}, r"4 stages need 3 places to cut"),
    "uneven": ("Mean(*linears(4))", "pp2 dp2, 1f1b x4", {}, r"or start with batch=8 or 16\.$"),
    "tied on a rank": ("tied()", "pp2 fsdp2, interleaved x2", {}, "cannot be sharded"),
}


def refusal(call, *args, **how) -> str:
    with pytest.raises(LayoutError) as raised:
        call(*args, **how)
    return str(raised.value)


@pytest.mark.parametrize("what", CASES)
def test_what_a_refusal_says_to_type_is_accepted(clusters, tmp_path, what):
    model, strategy, options, says = CASES[what]
    cell = CELL.replace("MODEL", model)
    engines = clusters(4)
    how = {"cell": cell, "steps": 2, "start": False, "directory": tmp_path}
    at_start = refusal(engines.train, strategy=strategy, **options, **how)
    run = engines.train(strategy="none", **how)
    why = refusal(run.switch, strategy, **options)
    assert re.search(says, why), why
    assert why == at_start
    proposed = re.findall(r'"(.*?)"', why.partition("se the layout ")[2])
    assert proposed, why
    for text in proposed:
        run.switch(text)
        run.step(1)
    run = engines.train(strategy=proposed[0], **how)
    assert run.step(1) == 1
