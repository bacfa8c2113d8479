"""Operations of a step are torch's count, by the formulas that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from workbench.engine import flops
from workbench.engine import recipe as recipes
from workbench.engine.skeleton import skeleton

CPU = torch.device("cpu")


def _recipe(model, inputs, target, loss=functional.mse_loss):
    names = {"model": lambda: model, "data": lambda: (inputs, target), "loss": loss}
    return recipes.from_namespace(names).changed(batch=4)


def test_two_linear_layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    recipe = _recipe(model, torch.rand(9, 8), torch.rand(9, 4))
    # Forward, gradients of weights, and of inputs where there is something before.
    expected = 2 * (3 * 16 * 4 + 2 * 8 * 16)
    assert flops.per_sample(skeleton(model), recipe, CPU) == expected


class Attention(nn.Module):
    """One head of width 8 over 6 places, and a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        """x [n, 6, 8] -> the same shape."""
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v)[:, 0]


def test_attention_counts_on_a_cpu_too():
    model = Attention()
    recipe = _recipe(model, torch.rand(5, 6, 8), torch.rand(5, 6, 8))
    attention = 2 * 6 * 6 * 8
    expected = 2 * 2 * 6 * 8 * 24 + (2 + 5) * attention
    assert flops.per_sample(skeleton(model), recipe, CPU) == expected


class Recurrent(nn.Module):
    """A sequence, and a layer on what is left of it."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.over = nn.LSTM(8, 64, batch_first=True, **options)
        self.head = nn.Linear(64 * (1 + self.over.bidirectional), 4)

    def forward(self, x):
        """x [n, 4, 8] -> [n, 4]."""
        return self.head(self.over(x)[0][:, -1])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, (8 + 64) * 256),
        ({"num_layers": 2}, (8 + 64 + 64 + 64) * 256),
        ({"bidirectional": True}, 2 * (8 + 64) * 256),
    ],
    ids=["plain", "two layers", "both ways"],
)
def test_a_fused_recurrent_layer_is_three_times_its_forward(options, weights):
    model = Recurrent(**options)
    recipe = _recipe(model, torch.rand(9, 4, 8), torch.rand(9, 4))
    expected = 3 * (2 * 4 * weights + 2 * model.head.weight.numel())
    assert flops.per_sample(skeleton(model), recipe, CPU) == expected


def test_layers_fused_on_a_gpu_count_every_weight_but_biases():
    """By the shapes that cuDNN's operation is called with: 4 steps, 16 samples, two layers."""
    formulas = flops._unknown_to_torch()
    ops = torch.ops.aten
    weights = [(256, 8), (256, 64), (256,), (256,), (256, 64), (256, 64), (256,), (256,)]
    once = 2 * 4 * 16 * (8 + 3 * 64) * 256
    assert formulas[ops._cudnn_rnn]((4, 16, 8), weights, 4, None) == once
    assert formulas[ops._cudnn_rnn_backward]((4, 16, 8), weights, 4, None) == 2 * once
    assert formulas[ops._cudnn_rnn]((64, 8), weights, 4, None) == once  # packed


class Forgetful(nn.Module):
    """The second of two parts may be run again on the way back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        """x [n, 8] -> [n, 4]."""
        x = self.first(x)
        if self.how == "kept":
            return self.second(x)
        return checkpoint(self.second, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["kept", "forgotten", "reentrant"])
def test_what_the_model_computes_again_counts_once(how):
    model = Forgetful(how)
    recipe = _recipe(model, torch.rand(9, 8), torch.rand(9, 4))
    expected = 2 * (2 * 8 * 8 + 3 * 8 * 16 + 3 * 16 * 4)
    assert flops.per_sample(skeleton(model), recipe, CPU) == expected


class Slope(nn.Module):
    """Gives the slope of what it computes: a way back that is part of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        """x [n, 8] -> the same shape."""
        x = x.clone().requires_grad_() * 1  # torch counts no way back to a leaf
        y = self.layer(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope + y


def test_a_way_back_within_the_forward_counts():
    model = Slope()
    recipe = _recipe(model, torch.rand(9, 8), torch.rand(9, 8))
    # Forward, slope; going back the gradients of x, and of the weights for either use.
    assert flops.per_sample(skeleton(model), recipe, CPU) == 5 * 2 * 8 * 8


class Pairs(nn.Module):
    """Products that torch counts nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Bilinear(8, 8, 4)

    def forward(self, x):
        """x [n, 8] -> [n, 4]."""
        return self.over(x, x)


def test_a_product_without_a_formula_has_no_count():
    model = Pairs()
    recipe = _recipe(model, torch.rand(4, 8), torch.rand(4, 4))
    assert flops.per_sample(skeleton(model), recipe, CPU) is None


class Choosy(nn.Linear):
    """Looks at what it computes."""

    def forward(self, input):
        """input [n, k] -> [n, m]."""
        out = super().forward(input)
        return out if out.sum().item() > 0 else -out


def test_a_model_that_looks_at_values_has_no_count():
    model = Choosy(3, 2)
    recipe = _recipe(model, torch.rand(4, 3), torch.rand(4, 2))
    assert flops.per_sample(skeleton(model), recipe, CPU) is None
