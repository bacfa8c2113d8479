"""What of a rank's memory is what."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench.engine.footprint import Saved, footprint
from workbench.engine.held import Held

WIDTH, ROWS, LAYERS = 32, 10, 4
ONE = ROWS * WIDTH * 4


def _chain() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(LAYERS))
    )


def _watched(forward) -> Saved:
    saved = Saved()
    with saved.watching():
        forward().sum().backward()
    return saved


def test_activations_are_what_autograd_keeps_each_once():
    model, x = _chain(), torch.rand(ROWS, WIDTH)
    saved = _watched(lambda: model(x))
    # The input of the first layer and each sigmoid's output, which is the next one's input.
    assert saved.peak_bytes == (1 + LAYERS) * ONE
    assert saved.now_bytes == 0


def test_recomputation_keeps_less():
    model, x = _chain(), torch.rand(ROWS, WIDTH, requires_grad=True)

    def forward():
        out = x
        for layer in model:
            out = checkpoint(layer, out, use_reentrant=False)
        return out

    assert 0 < _watched(forward).peak_bytes <= (LAYERS + 2) * ONE
    plain = _watched(lambda: model(x)).peak_bytes
    assert _watched(forward).peak_bytes <= plain


def test_microbatches_in_flight_are_counted_together():
    model, x = _chain(), torch.rand(ROWS, WIDTH)
    saved = Saved()
    with saved.watching():
        losses = [model(x.clone()).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
    assert saved.peak_bytes == 3 * (1 + LAYERS) * ONE


def test_parts_of_memory():
    model = nn.Linear(WIDTH, WIDTH)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(ROWS, WIDTH)).sum().backward()
    optimizer.step()
    weight, bias = WIDTH * WIDTH * 4, WIDTH * 4
    found = footprint(Held([model]), optimizer, None)
    assert (found["parameters"], found["gradients"]) == (weight + bias, weight)
    assert found["optimizer"] == 2 * weight + 4  # two moments, and a count
    assert found["activations"] is None
    assert found["resident"] > 10 << 20
