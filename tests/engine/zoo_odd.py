"""Models that write state, look at values, or hold their parts in odd ways."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

WIDTH = 6


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Straight(torch.autograd.Function):
    """Rounds; its gradient is not what autograd would find."""

    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad * 3


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x):
        for layer in self.layers:
            x = Straight.apply(layer(x)) + functional.dropout(x, 0.5, self.training)
        return x


class Counts(nn.Module):
    """A running mean in outer code, assigned anew, and a counter written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = self.layers[0](x)
        self.calls += 1
        x = self.layers[1](x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layers[2](x - self.mean)


class SharedNorm(nn.Module):
    """Running statistics that two depths write."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.layers[1](self.norm(self.layers[0](x)).relu()))


class Experts(nn.Module):
    """Each row goes to the expert that its values choose: no shapes without values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = linears(2)
        self.register_buffer("load", torch.zeros(2))

    def forward(self, x):
        choice = self.router(x).argmax(-1)
        self.load += choice.bincount(minlength=2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            out = out.index_copy(0, rows, expert(x[rows]))
        return x + out * self.router(x).softmax(-1).amax(-1, keepdim=True)


class LooksAtPositions(nn.Module):
    """Asks for values that only shapes decide; a mean under autocast that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x):
        positions = torch.arange(len(x), device=x.device).float()
        if (positions[1:] - positions[:-1] == 1).all():
            x = x + positions[:, None] / positions.max().item()
        for layer in self.layers:
            x = layer(x)
            with torch.autocast(x.device.type, enabled=False):
                x = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
        return x


class InDicts(nn.Module):
    """Parts in a dict, as in nanoGPT, and a list of lists; normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleList([linears(2), nn.ModuleList([nn.Sequential(*linears(2))])])
        parts = {"token": nn.Linear(WIDTH, WIDTH), "levels": inner, "norm": nn.LayerNorm(WIDTH)}
        self.parts = nn.ModuleDict(parts)
        self.plain = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bounded = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = self.parts.token(x)
        for level in self.parts["levels"]:
            for layer in level:
                x = x + layer(x).sin()
        return self.bounded(self.plain(self.parts.norm(x)))


class Cached(nn.Module):
    """A table that the first forward makes, and a part of it that is kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.rows = 0

    def forward(self, x):
        if self.rows < len(x):
            self.register_buffer("table", torch.arange(len(x)).float(), persistent=False)
            self.rows = len(x)
        return self.inner(x) * self.table[: len(x), None]


class CachedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)
        self.cached = Cached()

    def forward(self, x):
        return self.cached(self.layers[1](self.cached(self.layers[0](x))))
