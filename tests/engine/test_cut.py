"""Stages run one after another are the model: outputs, gradients, buffers, to the last bit."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor, nn
from tests.engine.zoo import ZOO, Counts, Tied, Twice, rows

from workbench.engine import recipe
from workbench.engine.cut import Cut, balance, cut, install, keep, run, unit_names
from workbench.engine.nest import tensors
from workbench.engine.skeleton import copy_of, skeleton
from workbench.errors import LayoutError

CPU = torch.device("cpu")
SIZES = [(name, num) for name, (_, _, units) in ZOO.items() for num in range(1, units + 1)]


class Chain:
    """Every stage on a copy with nothing but its own state; gradients as a pipeline sends them."""

    def __init__(self, model: nn.Module, made: Cut) -> None:
        self.plans, self.parts = made.stages, []
        for plan in made.stages:
            self.parts.append(copy.deepcopy(model))
            keep(self.parts[-1], plan.params, plan.buffers)

    def step(self, inputs, seed: int = 0):
        """The output; the gradients stay on the parts."""
        sent: tuple[Tensor, ...] = ()
        edges = []
        torch.manual_seed(seed)
        output = None
        for plan, part in zip(self.plans, self.parts, strict=True):
            metas = [(t.shape, t.dtype, t.requires_grad) for t in plan.takes]
            assert [(t.shape, t.dtype, t.requires_grad) for t in sent] == metas
            taken = tuple(t.detach().requires_grad_(t.requires_grad) for t in sent)
            output = run(plan, part, inputs, taken)
            edges.append((taken, sent := output if plan is not self.plans[-1] else ()))
        grads: list[Tensor | None] = []
        for taken, given in reversed(edges):
            if not given:
                loss(output).backward()
            else:
                pairs = [(t, g) for t, g in zip(given, grads, strict=True) if g is not None]
                torch.autograd.backward(*zip(*pairs, strict=True))
            grads = [t.grad for t in taken]
        return output

    def gradients(self) -> dict[str, Tensor]:
        """By name, of tied ones the sum."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            for name, param in part.named_parameters():
                if param.grad is not None:
                    found[name] = found[name] + param.grad if name in found else param.grad
        return found


def loss(output) -> Tensor:
    parts = [t for t in tensors(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def same(one, two) -> bool:
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert list(one) == list(two)
    pairs = list(zip(tensors(one), tensors(two), strict=True))
    return bool(pairs) and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def made(name: str):
    build, inputs, _ = ZOO[name]
    torch.manual_seed(0)
    return build(), inputs()


def assert_chain_is(model: nn.Module, inputs, num: int, **how) -> Cut:
    """Two steps of the chain and of the model have the same output, gradients and buffers."""
    plan = cut(skeleton(model), copy.deepcopy(inputs), num, device=CPU, **how)
    assert len(plan.stages) == num
    chain = Chain(model, plan)
    for seed in (1, 2):
        ours = chain.step(copy.deepcopy(inputs), seed)
        torch.manual_seed(seed)
        theirs = model(copy.deepcopy(inputs))
        assert same(ours, theirs)
        loss(theirs).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = chain.gradients()
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        # The sum of several contributions to a gradient may be taken in another order.
        torch.testing.assert_close(found[key], grad, rtol=1e-6, atol=1e-7)
    for key, buffer in model.named_buffers():
        holders = [dict(part.named_buffers()) for part in chain.parts]
        held = [buffers[key] for buffers in holders if key in buffers]
        assert held
        assert all(torch.equal(one, buffer) for one in held)
    assert {n for part in chain.parts for n, _ in part.named_parameters()} == {
        n for n, _ in model.named_parameters()
    }
    return plan


@pytest.mark.parametrize(("name", "num"), SIZES)
def test_stages_are_the_model(name, num):
    model, inputs = made(name)
    assert_chain_is(model, inputs, num)


@pytest.mark.parametrize("name", ZOO)
def test_units_are_as_many_as_stages_can_be(name):
    model, _ = made(name)
    assert len(unit_names(skeleton(model))) == ZOO[name][2]
