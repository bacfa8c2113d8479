"""Stages run one after another are the model: outputs, gradients, buffers, to the last bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.engine.zoo import ZOO, Tied, Twice, rows
from tests.engine.zoo_odd import SharedNorm
from workbench.engine import recipe
from workbench.engine.cut import (
    Cut,
    TooFewPlacesError,
    balance,
    cut,
    install,
    keep,
    run,
    unit_names,
)
from workbench.engine.nest import tensors
from workbench.engine.skeleton import skeleton
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
    model, inputs = made(name)
    units = unit_names(skeleton(model))
    assert len(units) == ZOO[name][2]
    plans = cut(skeleton(model), inputs, len(units), device=CPU).stages
    assert {unit for plan in plans for unit in plan.units} == set(units)
    assert sum(plan.share for plan in plans) == pytest.approx(1)


@pytest.mark.parametrize(("name", "size"), [("digits", None), ("pytext", "tiny")])
def test_builtin_recipes(name, size):
    made = recipe.builtin(name, size)
    torch.manual_seed(0)
    inputs, _ = made.samples.fetch(0, 4)
    plan = assert_chain_is(made.model(), inputs, 3)
    assert all(len(stage.takes) == 1 for stage in plan.stages[1:])


def test_units_of_a_gpt():
    model = recipe.builtin("pytext", "tiny").model()
    blocks = [f"blocks.{index}" for index in range(4)]
    assert unit_names(model) == ["token", "position", *blocks, "norm", "head"]


def test_names_stay_those_of_the_whole_model():
    model = Tied()
    plan = assert_chain_is(model, torch.arange(4), 3)
    assert plan.tied == {"token.weight": [0, 2]}
    last = copy.deepcopy(model)
    keep(last, plan.stages[2].params, plan.stages[2].buffers)
    assert last.head.weight is last.token.weight
    assert {name for name, _ in last.named_parameters()} <= dict(model.named_parameters()).keys()
    assert last.blocks[0].weight is None


def test_a_module_called_twice_is_on_both_stages():
    assert cut(skeleton(Twice()), rows(), 3, device=CPU).tied.keys() == {
        "shared.weight",
        "shared.bias",
    }


def test_what_depends_on_inputs_alone_does_not_cross():
    model, inputs = made("dict inputs")
    for plan in cut(skeleton(model), inputs, 4, device=CPU).stages[1:]:
        assert [tuple(taken.shape) for taken in plan.takes] == [(3, 4, 6)]


def test_dtypes_under_autocast():
    model, inputs = made("nested")
    with torch.autocast("cpu", torch.bfloat16):
        plan = assert_chain_is(model, inputs, 3, precision_dtype=torch.bfloat16)
    assert plan.stages[1].takes[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["looks at positions", "own gradient"])
def test_what_the_forward_switches_off_stays_off(name):
    model, inputs = made(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert_chain_is(model, inputs, 3, precision_dtype=torch.bfloat16)


def test_other_shapes_are_cut_at_the_same_places():
    model = Tied().eval()
    bones = skeleton(model)
    whole = cut(bones, torch.arange(8).view(2, 4), 3, device=CPU)
    inputs = torch.arange(3).view(1, 3)
    other = cut(bones, inputs, 3, device=CPU, training=False, like=whole)
    assert [plan.units for plan in other.stages] == [plan.units for plan in whole.stages]
    assert same(Chain(model, other).step(inputs), model(inputs))
    with pytest.raises(LayoutError, match="Cut the model for these"):
        run(whole.stages[0], model, inputs)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum().isnan():
                return None
        return x


def test_stages_of_the_recipe_are_called_one_after_another():
    model, inputs = Looks(), rows()

    def stages(model):
        return [model.layers[0], model.layers[1], model.layers[2]]

    assert_chain_is(model, inputs, 2, stages=stages)
    assert unit_names(model, stages) == ["layers.0", "layers.1", "layers.2"]


def test_hooks_of_units_and_of_what_wraps_the_model_fire():
    model, inputs = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), rows()
    model[1].register_forward_hook(lambda module, given, out: out * 2)
    model.register_forward_hook(lambda module, given, out: out + 1)
    plan = cut(skeleton(model), inputs, 2, device=CPU).stages
    parts = [copy.deepcopy(model) for _ in plan]
    for stage, part in zip(plan, parts, strict=True):
        install(stage, part)
    fired = []
    parts[1].register_forward_pre_hook(lambda module, given: fired.append(len(given)))
    assert torch.equal(parts[1](inputs, parts[0](inputs)), model(inputs))
    assert fired == [2]
    assert [name for name, _ in parts[1].named_parameters()] == ["1.weight", "1.bias"]


def test_more_stages_than_parts():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    with pytest.raises(LayoutError, match=r"need 3 places to cut.*has 2\.$") as raised:
        cut(skeleton(model), rows(), 4, device=CPU)
    assert isinstance(raised.value, TooFewPlacesError)
    assert raised.value.most == 3


def test_written_state_stays_on_one_stage():
    model = SharedNorm()
    inputs = rows()
    with pytest.raises(LayoutError, match=r"norm\.\w+, which is written in the forward"):
        cut(skeleton(model), inputs, 4, device=CPU)


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        x = self.layers[0](x)
        order = x.argsort(0)
        return self.layers[1](x).gather(0, order)


def test_a_value_without_gradient_does_not_cross():
    with pytest.raises(LayoutError, match=r"layers.1 lies a value int64 \[4, 6\]"):
        cut(skeleton(Sorts()), rows(), 2, device=CPU)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_balance_is_the_best_of_all(num):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.randint(1, 6, (6,), generator=generator).tolist()
        crossing = [
            None if c == 0 else float(c)
            for c in torch.randint(0, 4, (5,), generator=generator).tolist()
        ]
        free = [i + 1 for i, moved in enumerate(crossing) if moved is not None]
        ways = list(itertools.combinations(free, num - 1))
        if not ways:
            with pytest.raises(IndexError):
                balance(costs, crossing, num)
            continue

        def price(cuts, costs=costs, crossing=crossing):
            ends = itertools.pairwise([0, *cuts, len(costs)])
            return max(sum(costs[a:b]) for a, b in ends), sum(crossing[i - 1] for i in cuts)

        assert price(balance(costs, crossing, num)) == min(map(price, ways))
