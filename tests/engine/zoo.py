"""Models of many forms that the tests of tapes and cuts take apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.zoo_odd import (
    WIDTH,
    CachedTwice,
    Counts,
    Experts,
    InDicts,
    LooksAtPositions,
    OwnGradient,
    linears,
)


class Tied(nn.Module):
    """A head that is the embedding; the loop adds to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, WIDTH)
        self.blocks = linears(3)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x):
        x = self.token(x.remainder(11))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class TiedByFunction(Tied):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x):
        x = self.token(x.remainder(11))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return functional.linear(x, self.token.weight)


class UNet(nn.Module):
    """What the way down leaves is used by the way up, across several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = linears(3), linears(3)

    def forward(self, x):
        left = []
        for layer in self.down:
            x = layer(x).relu()
            left.append(x)
        for layer, skip in zip(self.up, reversed(left), strict=True):
            x = layer(x + skip)
        return x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        first = self.layers[0](x)
        x = self.layers[1](first)
        x += first
        x[:, 0] = first[:, 1] * 2
        x = self.act(self.layers[2](x))
        x = x * 0.5
        x.add_(first).mul_(2)
        out = torch.zeros_like(x)
        out[:, ::2] = x[:, ::2]
        kept = self.layers[3](out)
        return kept.clamp_(-1, 1) + out


class WrittenAfterTheCut(nn.Module):
    """A unit that writes over what it is given, and one whose input is written by outer code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x):
        x = self.layers[0](x.clone())
        y = self.layers[1](x * 1)
        x.add_(y)
        return self.layers[2](x)


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x):
        x.mul_(2)
        for layer in self.layers:
            x = layer(x).sin()
        return x


class PlainParameters(nn.Module):
    """Parameters and buffers of the model itself, used between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.last = nn.Parameter(torch.rand(WIDTH, 2))
        self.unused = nn.Parameter(torch.rand(2))
        self.layers = linears(3)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("table", torch.rand(20, WIDTH), persistent=False)
        self.register_buffer("scratch", torch.rand(1))

    def forward(self, x):
        x = x * self.scale + self.table[: len(x)]
        for layer in self.layers:
            x = layer(x) + self.shift
        return x @ self.last * self.scale[0]


class Block(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out))

    def forward(self, x):
        out = self.bn1(self.conv1(x))
        out += self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(4, 4), Block(4, 4))
        self.layer2 = nn.Sequential(Block(4, 6), Block(6, 6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class DictInputs(nn.Module):
    """Inputs in a dict, a mask made of them that every block needs, a flag among them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Attend() for _ in range(3))

    def forward(self, inputs):
        x = self.token(inputs["ids"].remainder(7))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask = mask & inputs["mask"][:, None]
        mask[:, :, 0] = True
        for block in self.blocks:
            x, weights = block(x, mask=mask, shift=None, more={"double": inputs["double"]})
        return {"x": x, "weights": weights, "none": None, "mask": mask}


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, mask, shift, more):
        assert shift is None
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).masked_fill(~mask, -1e4).softmax(-1)
        return x + (weights @ v) * (2 if more["double"] else 1), weights


class Twice(nn.Module):
    """One module called at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.shared(self.layers[0](x))
        return self.shared(self.layers[1](x).tanh())


@dataclass
class State:
    x: Tensor
    angles: tuple[Tensor, Tensor]
    note: str


class Rotates(nn.Module):
    """A part without parameters that gives a pair, a dataclass between blocks, split and unbind."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Linear(WIDTH, WIDTH)
        self.angles = Angles()
        self.blocks = nn.ModuleList(Rotated() for _ in range(3))

    def forward(self, x):
        state = State(self.token(x), self.angles(x), "note")
        for block in self.blocks:
            state = block(state)
        low, high = state.x.split(WIDTH // 2, -1)
        first, *rest = low
        a, b, c = torch.stack([high, high * 2, low]).unbind(0)
        with torch.no_grad():
            scale = state.x.abs().amax(-1, keepdim=True) + 1
        best = state.x.max(dim=-1)
        return (a + b * c) / scale + first, [torch.stack(rest).sum(), best.values]


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freq", torch.rand(WIDTH), persistent=False)

    def forward(self, x):
        angle = torch.arange(x.shape[0], device=x.device)[:, None] * self.freq
        return angle.cos(), angle.sin()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        cos, sin = state.angles
        return State(self.inner(state.x) * cos + state.x * sin, state.angles, state.note)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.rnn2 = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x):
        x, _ = self.rnn(self.token(x.remainder(7)))
        return self.head(self.rnn2(x)[0])


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH))),
        nn.Dropout(0.5),
        nn.Linear(WIDTH, 2),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def rows() -> Tensor:
    return torch.rand(4, WIDTH)


def ids() -> Tensor:
    return torch.arange(12).view(3, 4)


def masked() -> dict:
    return {"ids": ids(), "mask": torch.rand(3, 4) > 0.3, "double": True}


def pictures() -> Tensor:
    return torch.rand(4, 1, 6, 6)


# name -> (model, inputs, units with parameters)
ZOO = {
    "tied": (Tied, ids, 5),
    "tied by function": (TiedByFunction, ids, 4),
    "unet": (UNet, rows, 6),
    "in place": (InPlace, rows, 4),
    "written after the cut": (WrittenAfterTheCut, rows, 3),
    "writes its input": (WritesItsInput, rows, 3),
    "plain parameters": (PlainParameters, rows, 3),
    "resnet": (ResNet, pictures, 7),
    "dict inputs": (DictInputs, masked, 4),
    "rotates": (Rotates, rows, 4),
    "twice": (Twice, rows, 3),
    "own gradient": (OwnGradient, rows, 3),
    "counts": (Counts, rows, 3),
    "experts": (lambda: nn.Sequential(*(Experts() for _ in range(3))), rows, 3),
    "looks at positions": (LooksAtPositions, rows, 3),
    "in dicts": (InDicts, rows, 7),
    "cached twice": (CachedTwice, rows, 3),
    "recurrent": (Recurrent, ids, 4),
    "nested": (nested, rows, 3),
    "transformer": (transformer, lambda: torch.rand(2, 3, WIDTH), 3),
}
