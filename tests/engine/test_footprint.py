"""What of a rank's memory is what."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench.engine.footprint import Saved, footprint
from workbench.engine.held import Held
from workbench.engine.recompute import recompute

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


class Wide(nn.Module):
    """Keeps far more inside than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x):
        """x [n, WIDTH] -> the same shape."""
        return torch.sigmoid(self.down(torch.sigmoid(self.up(x))))


INSIDE = (1 + 16 + 1) * ONE  # its input, the wide layer, and its output


@pytest.mark.parametrize("how", ["the layout's", "the model's", "reentrant"])
def test_what_a_block_keeps_when_it_runs_again_is_counted(how):
    blocks = nn.ModuleList(Wide() for _ in range(LAYERS))
    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    if how == "the layout's":
        recompute(list(blocks))

    def forward():
        out = x
        for block in blocks:
            if how == "the layout's":
                out = block(out)
            else:
                out = checkpoint(block, out, use_reentrant=how == "reentrant")
        return out

    saved = _watched(forward)
    # The inputs of all blocks, and the inside of the last, whose output nobody else keeps.
    assert saved.peak_bytes == (LAYERS - 1) * ONE + INSIDE
    assert saved.now_bytes == 0
    plain = copy.deepcopy(blocks)
    plain.zero_grad()
    for block in plain:
        vars(block).pop("forward", None)
    nn.Sequential(*plain)(x).sum().backward()
    for mine, other in zip(blocks.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


def test_a_block_that_runs_again_for_each_use_is_counted_while_it_is_kept():
    block, x = Wide(), torch.rand(ROWS, WIDTH, requires_grad=True)
    saved = Saved()
    with saved.watching():
        out = checkpoint(block, x, use_reentrant=False)
        for _ in range(2):
            out.sum().backward(retain_graph=True)
    assert saved.peak_bytes == INSIDE
    assert saved.now_bytes == ONE
    del out
    assert saved.now_bytes == 0


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
