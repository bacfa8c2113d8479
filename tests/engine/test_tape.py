"""What a forward does is on the tape, and recording it leaves no trace; what cannot be, is told."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.engine.zoo import Tied, rows
from tests.engine.zoo_odd import WIDTH, Experts, linears
from workbench.engine import recipe
from workbench.engine.cut import unit_names
from workbench.engine.recorder import record
from workbench.engine.skeleton import skeleton
from workbench.engine.tape import Tape
from workbench.errors import LayoutError, RecipeError

CPU = torch.device("cpu")


def taped(model: nn.Module, inputs=None, **how) -> Tape:
    return record(skeleton(model), rows() if inputs is None else inputs, device=CPU, **how)


def by_unit(tape: Tape) -> dict:
    return {node.unit: node for node in tape.nodes if node.unit}


def test_units_and_what_is_between_them():
    tape = taped(Tied(), torch.arange(4))
    units = [node.unit for node in tape.nodes if node.unit]
    assert units == ["token", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [n.function.__name__ for n in tape.nodes if n.function][-2:] == ["tanh", "add"]
    assert by_unit(tape)["head"].state == {"token.weight"}


def test_cost_is_that_of_the_matmuls_and_more():
    nodes = by_unit(taped(nn.Sequential(nn.Linear(64, 512), nn.ReLU()), torch.rand(8, 64)))
    matmul = 2 * 8 * 64 * 512
    assert matmul < nodes["0"].cost < 1.7 * matmul
    assert 0 < nodes["1"].cost < nodes["0"].cost
    attention = nn.MultiheadAttention(64, 4, batch_first=True, bias=False)

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    short, long = (
        by_unit(taped(Attends(), torch.rand(1, n, 64)))["attention"].cost for n in (256, 512)
    )
    # Twice the tokens: what is linear in them doubles, and scores and their use are 4 n^2 width.
    assert long - 2 * short == pytest.approx(4 * 64 * (512**2 - 2 * 256**2), rel=0.01)


def test_recording_leaves_no_trace():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    fired = []
    model[0].register_forward_hook(lambda module, given, out: fired.append(len(out)))
    bones = skeleton(model)
    buffers = {name: buffer.clone() for name, buffer in bones.named_buffers()}
    inputs = rows()
    kept = inputs.clone()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    apply = torch.autograd.Function.apply
    record(bones, inputs, device=CPU)
    assert fired == [4]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in bones.named_buffers())
    assert all(param.is_meta for param in bones.parameters())
    assert torch.equal(inputs, kept)
    assert torch.autograd.Function.apply == apply
    assert type(model[0]) is nn.Linear


def test_recording_is_fast(capsys):
    made = recipe.builtin("pytext", "small")
    bones = skeleton(made.model())
    inputs, _ = made.samples.fetch(0, 4)
    seconds = []
    for _ in range(4):
        # Of this process, not of the clock, since the machine of a test may be shared.
        began_s = time.process_time()
        record(bones, inputs, device=CPU)
        seconds.append(time.process_time() - began_s)
    with capsys.disabled():
        print(  # noqa: T201 - a figure to look at in the log of the tests
            f"\nrecording pytext small: {min(seconds):.3f} s warm, {seconds[0]:.3f} s at first"
        )
    assert min(seconds) < 0.6  # 0.16 s when nothing else runs


class Says(nn.Module):
    """A model whose forward is the function given, called with its layers and the inputs."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.layers = linears(2)
        self.says = [forward]
        self.count = 0

    def forward(self, x):
        return self.layers[1](self.says[0](self, self.layers[0](x)))


def looks(model, x):
    return x * 2 if x.sum() > 0 else x


def items(model, x):
    return x * x.sum().item()


def lists(model, x):
    return x + torch.tensor(x.detach().tolist())


def arrays(model, x):
    return x + torch.from_numpy(x.detach().numpy())


def selects(model, x):
    return x[x[:, 0] > 0]


def layer_drop(model, x):
    return x if torch.rand(()) < 0.5 else x * 2


def python_random(model, x):
    return x if random.random() < 0.5 else x * 2


def numpy_random(model, x):
    return x * np.random.rand()


def counts(model, x):
    model.count += 1
    return x / model.count


def maps(model, x):
    return torch.vmap(lambda row: row * 2)(x)


def remembers(model, x):
    return x + model.layers[0].weight.new_ones(()) + model.layers[0].kept


def writes(model, x):
    OUTSIDE[: len(x)] = x
    return OUTSIDE[: len(x)] * 2


OUTSIDE = torch.zeros(10, WIDTH)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (looks, r"in `return x \* 2 if x.sum\(\) > 0 else x` \(test_tape.py, line \d+\) looks at"),
        (items, "looks at values"),
        (lists, "looks at values"),
        (arrays, "looks at values"),
        (selects, r"`return x\[x\[:, 0\] > 0\]`.* looks at values"),
        (layer_drop, "looks at values"),
        (python_random, "draws numbers from Python's or NumPy's random"),
        (numpy_random, "draws numbers from Python's or NumPy's random"),
        (counts, "changes self.count, a plain attribute"),
        (maps, "uses torch.func or torch.vmap"),
        (remembers, "uses a tensor that a part kept to itself"),
        (writes, "writes into a tensor that is neither a buffer nor made there"),
    ],
)
def test_refusals_say_where_and_what_to_give(forward, says):
    model = Says(forward)
    if forward is remembers:
        model.layers[0] = Keeps()
    with pytest.raises(LayoutError, match=says) as refused:
        taped(model)
    assert str(refused.value).startswith("Says")
    assert "def stages(model)" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not OUTSIDE.any()
    assert not OUTSIDE.requires_grad


class Keeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept * 1


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.inner(x)
        return x[x[:, 0] > 0]


def test_a_unit_whose_shape_depends_on_values_is_named():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Filters())
    with pytest.raises(LayoutError, match=r"cannot have 1 run alone .* shape .* depends on values"):
        taped(model, torch.randn(50, WIDTH))


def test_a_unit_that_looks_at_values_leaves_no_trace_either():
    model = nn.Sequential(Experts(), nn.Linear(WIDTH, 2))
    inputs = rows()
    before = torch.get_rng_state()
    tape = taped(model, inputs)
    assert torch.equal(before, torch.get_rng_state())
    assert [tuple(value.shape) for value in tape.values] == [(4, WIDTH), (4, WIDTH), (4, 2)]
    assert tape.changed == {"0.load"}


@pytest.mark.parametrize("given", [[], [nn.Linear(2, 2)], None, functional.relu])
def test_stages_gives_submodules_of_the_model(given):
    with pytest.raises(RecipeError, match="stages"):
        unit_names(Tied(), lambda model: given)


def test_a_model_that_takes_other_inputs():
    with pytest.raises(LayoutError, match="mat1 and mat2"):
        taped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.rand(3, 5))
