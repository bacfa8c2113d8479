"""Models and trainings that the tests of state and checkpoints share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from workbench.engine import state
from workbench.engine.moves import move


class Odd(nn.Module):
    """Rows that divide by nothing, one row only, a scalar, buffers, a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.narrow = nn.Linear(7, 1)
        self.back = nn.Linear(1, 5, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(2, 2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        """x [n, 5] -> [n, 7]."""
        return self.tied(self.back(self.narrow(self.norm(self.first(x)))))


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}


def training(optimizer="adamw", *, shard=False, seed=0, steps=0):
    """A model and its optimizer, replicated or sharded over all ranks, after some steps."""
    torch.manual_seed(seed)
    model = Odd()
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.narrow, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optim = OPTIMIZERS[optimizer](model.parameters())
    step(model, optim, steps)
    return model, optim


def step(model, optim, steps=1):
    """The same steps on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optim.zero_grad()
        model(torch.rand(4, 5, generator=generator)).square().mean().backward()
        optim.step()


def whole_state(model, optim):
    """Every key with its whole tensor, copied."""
    pieces = state.take(model, optim)
    full = {key: _empty(piece) for key, piece in pieces.items()}
    move(pieces, full)
    return {key: piece.local for key, piece in full.items()}


def carry(source, target):
    """The state of (model, optimizer) into another one, as a switch does."""
    want = state.take(*target)
    move(state.take(*source), want)
    state.put_numbers(*target, want)


def _empty(piece):
    local = torch.empty(piece.shape, dtype=piece.local.dtype)
    return state.Piece(local, (0,) * len(piece.shape), piece.shape, piece.buffer)


def same(one, two):
    """Bit for bit, key for key."""
    return one.keys() == two.keys() and all(
        one[key].dtype == two[key].dtype and torch.equal(one[key], two[key]) for key in one
    )
