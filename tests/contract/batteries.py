"""What the batteries over layouts share: small models, one plain process, and ranks beside it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.procs import ranks
from workbench.engine import dropout, state
from workbench.engine import recipe as recipes
from workbench.engine.blueprint import Blueprint, Plan
from workbench.engine.metered_group import Meter
from workbench.engine.moves import move
from workbench.engine.state import Piece
from workbench.engine.trainer import Trainer, seeded
from workbench.engine.world import Meeting, World
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions
from workbench.spec.records import COLUMNS
from workbench.spec.schedules import SCHEDULES

# Blocks, tied embeddings, dropout (one module in two stages), a parameter of its own, a buffer.
GPT = """
import torch
from torch import nn
from torch.nn import functional as F

batch, seed, WIDTH, WORDS = 16, 3, 16, 24

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = 8
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(DROP)

    def forward(self, x):
        n, t, _ = x.shape
        y = self.norm(x)
        parts = [f(y).view(n, t, self.heads, -1) for f in (self.q, self.k, self.v)]
        q, k, v = [part.transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.drop(self.o(y.reshape(n, t, -1)))
        return x + self.down(self.drop(F.gelu(self.up(self.norm2(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(6, WIDTH) * 0.02)
        self.register_buffer("scale", torch.tensor(1.5))
        self.drop = nn.Dropout(DROP)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.drop(self.token(ids) * self.scale + self.place)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))

def model():
    return Net()

def data():
    ids = torch.randint(WORDS, (61, 7), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)
"""


def gpt(blocks: int = 14, drop: float = 0.1, **changes: Any) -> recipes.Recipe:
    """A recipe as a user would write it in a cell."""
    namespace: dict = {"BLOCKS": blocks, "DROP": drop}
    exec(GPT, namespace)
    return recipes.from_namespace(namespace).changed(**changes)


def layouts(world_size: int, *, every_schedule: bool = True) -> Iterator[Layout]:
    """Every product of degrees that makes up so many ranks, pipelines in every schedule.

    every_schedule: False takes the schedules in turn, one more for each product.
    """
    degrees = [n for n in range(1, world_size + 1) if world_size % n == 0]
    turn = itertools.cycle(SCHEDULES)
    for pp, replicate, shard, tp in itertools.product(degrees, repeat=4):
        if pp * replicate * shard * tp != world_size:
            continue
        how = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "tp": tp}
        if pp == 1:
            yield Layout(**how)
            continue
        if every_schedule:
            yield Layout(**how)  # one microbatch: by layers, one after another
        for schedule in SCHEDULES if every_schedule else (next(turn),):
            least = SCHEDULES[schedule].least_microbatches(pp)
            yield Layout(**how, schedule=schedule, microbatches=max(2, least))


def plain(recipe: recipes.Recipe, steps: int, options: TrainOptions) -> list[tuple]:
    """(loss, gradients by name) of each step of one process with a loop written out."""
    with seeded(recipe.seed):
        model = recipe.model()
    draw = dropout.Draw()
    dropout.make_invariant(model, draw, recipe.seed)
    optimizer = recipe.optimizer(model.parameters())
    found = []
    for step in range(steps):
        if callable(recipe.lr):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr(step)
        first = step * recipe.batch
        draw.put((step, first, recipe.batch, 0, {}))
        inputs, target = recipe.samples.fetch(first, recipe.batch)
        optimizer.zero_grad()
        loss = recipe.loss(model(inputs), target)
        loss.backward()
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found.append((loss.item(), grads))
    return found


class Ranks:
    """One rank of a battery: a world, a recipe, a trainer that is switched about."""

    def __init__(self, rank: int, size: int, store: str, recipe: Any, options: TrainOptions):
        dist.barrier()  # who leaves while others still connect would break them off
        dist.destroy_process_group()
        self.rank = rank
        self.world = World(Meeting(rank, size, 0, store, 120, 120), Meter())
        with seeded(recipe.seed):
            self.model = recipe.model()
        self.blueprint = Blueprint(Plan(recipe, options), self.model, self.world.device)

    def trainer(self, layout: Layout) -> Trainer:
        """One without values."""
        return Trainer(self.blueprint, layout, self.world)

    def fresh(self, layout: Layout) -> Trainer:
        """A training at its first step."""
        trainer = self.trainer(layout)
        state.fill(trainer.held, self.model)
        return trainer

    def steps(self, trainer: Trainer, steps: int) -> list[tuple]:
        """(loss, whole gradients by name) of each step; the gradients on rank 0 only."""
        found: list[tuple] = []
        step = trainer.optimizer.step

        def watched(*args: Any) -> None:
            found.append(self._whole_gradients(trainer))
            step(*args)

        if not trainer.spread.is_idle:
            trainer.optimizer.step = watched  # pyright: ignore[reportAttributeAccessIssue]
        losses = []
        for _ in range(steps):
            loss = torch.zeros((), dtype=torch.float64)
            if trainer.spread.is_idle:
                found.append(self._whole_gradients(trainer))
            else:
                columns: dict[str, list] = {name: [] for name in COLUMNS}
                trainer.run_steps(1, columns, follows=False)
                loss += columns["loss"][0]
            dist.all_reduce(loss)
            losses.append(loss.item())
        if not trainer.spread.is_idle:
            trainer.optimizer.step = step
        return list(zip(losses, found, strict=True))

    def _whole_gradients(self, trainer: Trainer) -> dict[str, Tensor]:
        held, have = trainer.held, {}
        for name, param in held.named_parameters():
            if param.grad is not None:
                local, box = held.local(name, param.grad)
                have[name] = Piece(local, box.offset, held.shape_of(name, param.grad))
        every: list[Any] = [None] * self.world.size
        dist.all_gather_object(every, {name: piece.shape for name, piece in have.items()})
        shapes = {name: shape for known in every for name, shape in known.items()}
        want = {}
        if self.rank == 0:
            for name, shape in shapes.items():
                want[name] = Piece(torch.full(shape, torch.nan), (0,) * len(shape), shape)
        move(have, want)
        return {name: piece.local for name, piece in want.items()}

    def close(self) -> None:
        """Leave the world, and stand as the harness expects."""
        self.world.close()
        store = dist.FileStore(f"{tempfile.mkdtemp()}/none", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def differences(found: list[tuple], expected: list[tuple]) -> list[str]:
    """Where losses differ by more than 1e-5, or a gradient by more than that of the whole norm."""
    told = []
    for step, ((loss, grads), (right, whole)) in enumerate(zip(found, expected, strict=True)):
        if not abs(loss - right) <= 1e-5 * abs(right):
            told.append(f"step {step}: loss {loss} instead of {right}")
        if grads.keys() != whole.keys():
            told.append(f"step {step}: gradients of {sorted(grads.keys() ^ whole.keys())}")
            continue
        norm = torch.stack([grad.norm() for grad in whole.values()]).norm()
        wrong = [n for n, grad in grads.items() if not (grad - whole[n]).norm() <= 1e-5 * norm]
        if wrong:
            told.append(f"step {step}: wrong gradients of {', '.join(wrong[:6])} ({len(wrong)})")
    return told


def on_ranks(size: int, function: Any, *args: Any, timeout_s: float = 800.0) -> list[Any]:
    """function(rank, store, *args) on real processes."""
    with tempfile.TemporaryDirectory() as folder:
        return ranks(size, function, str(Path(folder) / "store"), *args, timeout_s=timeout_s)
