"""Law 1 across switches: every ordered pair of layouts, in one training that never stops."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.contract.batteries import Ranks, differences, gpt, layouts, on_ranks, plain
from workbench.engine import recipe as recipes
from workbench.engine import state
from workbench.engine.carry import carry
from workbench.engine.kept import Kept
from workbench.spec.layout import Layout, parse_layout
from workbench.spec.options import TrainOptions

# Minutes on a busy machine, a quarter of that on a quiet one.
pytestmark = pytest.mark.timeout(900)

SMALLER = ("dp1", "dp2", "pp2, 1f1b x2")


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def walk(places: list[Layout]) -> list[Layout]:
    """A way that takes each ordered pair of different places once (Hierholzer)."""
    left = {a: [b for b in places if b != a] for a in places}
    way: list[Layout] = []
    stack = [places[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            way.append(stack.pop())
    return way[::-1]


def one_of_each_product(world_size: int) -> Iterator[Layout]:
    """One schedule for each product of degrees, and what leaves ranks idle."""
    seen = set()
    for layout in layouts(world_size):
        key = tuple(layout.degrees().values())
        if key not in seen and not (layout.pp > 1 and layout.microbatches == 1):
            seen.add(key)
            yield layout
    for text in SMALLER:
        yield parse_layout(text)


def switched(one: Ranks, old, layout: Layout):
    new = one.trainer(layout)
    carry(Kept.of(old, leaves=False), new)
    return new


def _pairs(rank, store, size, clip):
    options = TrainOptions(clip=clip)
    recipe = replace(gpt(blocks=3), optimizer=adamw)
    one = Ranks(rank, size, store, recipe, options)
    way = walk(list(one_of_each_product(size)))
    trainer = one.fresh(way[0])
    found = one.steps(trainer, 1)
    for layout in way[1:]:
        trainer = switched(one, trainer, layout)
        found += one.steps(trainer, 1)
    told = []
    if rank == 0:
        for layout, step, right in zip(way, found, plain(recipe, len(way), options), strict=True):
            told += [f"{layout}: {what}" for what in differences([step], [right])]
    one.close()
    return told, len(way)


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.long), 0.5])
def test_every_ordered_pair_of_layouts_goes_on_with_the_same_gradients(clip):
    told, num_steps = on_ranks(4, _pairs, 4, clip)[0]
    assert told == []
    assert num_steps > 100


CYCLE = ("dp2", "pp2, 1f1b x2", "fsdp2", "tp2", "dp1", "pp2, zbv x2")


def _standing() -> dict[str, int]:
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
    }


def _again_and_again(rank, store, rounds):
    recipe = replace(gpt(blocks=1), optimizer=adamw)
    one = Ranks(rank, 2, store, recipe, TrainOptions())
    way = [parse_layout(text) for text in CYCLE]
    trainer = one.fresh(way[-1])
    stood = []
    for _ in range(rounds):
        for layout in way:
            trainer = switched(one, trainer, layout)
            one.steps(trainer, 1)
        stood.append(_standing())
    del trainer
    one.close()
    return stood


def test_two_hundred_switches_leave_nothing_behind():
    for stood in on_ranks(2, _again_and_again, 34):
        assert stood[-1] == stood[2]


def _peak(rank, store, before, after):
    recipe = recipes.builtin("pytext", "small")
    one = Ranks(rank, 4, store, recipe, TrainOptions())
    trainer = one.fresh(parse_layout(before))
    one.model = None
    state.take(trainer.held, trainer.optimizer)  # the optimizer's state is there
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    stood_kb = _status("VmRSS")
    new = switched(one, trainer, parse_layout(after))
    peak_kb = _status("VmHWM")
    shard = sum(p.local.nbytes for p in state.take(new.held, new.optimizer).values())
    one.close()
    return 1024 * (peak_kb - stood_kb), shard


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(("before", "after"), [("fsdp4", "tp4"), ("dp4", "fsdp4"), ("pp4", "dp4")])
def test_a_switch_needs_no_more_memory_than_old_and_new_and_a_buffer(before, after):
    buffers_bytes = 120 << 20
    for peak_bytes, shard_bytes in on_ranks(4, _peak, before, after):
        assert peak_bytes < shard_bytes + buffers_bytes


def test_the_walk_takes_every_pair_once():
    places = [Layout(dp_replicate=n) for n in range(1, 5)]
    pairs = list(itertools.pairwise(walk(places)))
    assert len(pairs) == len(set(pairs)) == 12
