"""The obvious rival: a hand-written DDP loop under torchrun, with a recipe's model and data.

Usage: torchrun --nproc-per-node N ddp_loop.py RECIPE SIZE WARMUP STEPS; rank 0 prints steps/s.
It draws its batches with one permutation per epoch and indexed tensors, which is the fastest
plain way, and looks at no loss.
"""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from workbench.engine import recipe as recipes


def main() -> None:
    """Warm up, then time the steps between two barriers."""
    name, size, warmup, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    recipe = recipes.builtin(name, size if size != "-" else None)
    torch.manual_seed(recipe.seed)
    model = DistributedDataParallel(recipe.model(), gradient_as_bucket_view=True)
    optimizer = recipe.optimizer(model.parameters())
    share = recipe.batch // ranks
    length = int(recipe.samples.length or 0)
    position, order = length, torch.empty(0)
    started_s = 0.0
    for step in range(warmup + steps):
        if step == warmup:
            dist.barrier()
            started_s = time.perf_counter()
        if position + recipe.batch > length:
            order, position = torch.randperm(length), 0
        index = order[position + rank * share : position + (rank + 1) * share]
        position += recipe.batch
        inputs, target = batch_of(recipe, index)
        loss = recipe.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    taken_s = time.perf_counter() - started_s
    if rank == 0:
        print(f"steps_per_s {steps / taken_s}")
    dist.destroy_process_group()


def batch_of(recipe: recipes.Recipe, index: torch.Tensor) -> Any:
    """Inputs and targets of dataset indices, the fast way."""
    source = recipe.samples.source
    if isinstance(source, tuple):
        return source[0][index], source[1][index]
    if callable(source):
        return source(index)
    return torch.utils.data.default_collate([source[i] for i in index.tolist()])


if __name__ == "__main__":
    main()
