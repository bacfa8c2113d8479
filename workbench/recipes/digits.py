"""Handwritten digits: 1,797 pictures of 8 x 8 pixels that come with scikit-learn.

Source: E. Alpaydin and C. Kaynak 1998, https://doi.org/10.24432/C50P49
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import RecipeError

TEST_SAMPLES = 360
batch = 64
loss = nn.functional.cross_entropy


@functools.cache
def _split() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(inputs [n, 64] in 0..1, targets [n]) of training and of testing; the same in every run."""
    # The file itself, not load_digits(): importing sklearn takes seconds on each rank.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise RecipeError("digits needs scikit-learn. Type: pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.int64))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    inputs, targets = table[:, :-1].float() / 16, table[:, -1].clone()
    train = inputs[TEST_SAMPLES:], targets[TEST_SAMPLES:]
    return train, (inputs[:TEST_SAMPLES], targets[:TEST_SAMPLES])


def _mlp() -> nn.Module:
    # Six layers with parameters: enough for a pipeline of four ranks.
    widths = (64, 256, 256, 256, 256, 256, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)  # BatchNorm has one
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *layer(1, 16),
        *layer(16, 32),
        nn.MaxPool2d(2),
        *layer(32, 32),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


# 0.3 M parameters, and 0.05 M with batch statistics.
SIZES = {"mlp": _mlp, "cnn": _cnn}


def model(size: str) -> nn.Module:
    """One of SIZES, a perceptron or convolutions: pixels [n, 64] to logits [n, 10]."""
    return SIZES[size]()


def data() -> tuple[Tensor, Tensor]:
    """The 1,437 pictures to train on."""
    return _split()[0]


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """Share of the 360 test pictures that the model names right."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in _split()[1])
    return {"accuracy": (model(inputs).argmax(-1) == targets).float().mean().item()}
