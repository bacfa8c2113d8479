"""Operations of a step are torch's count, by the formulas that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_of_this_device(dtype):
    assert 1e7 < flops.peak_per_s(CPU, dtype) < 1e15
