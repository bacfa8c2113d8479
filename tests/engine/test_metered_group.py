"""The metered group: every collective goes through, is counted, and held time is the wait."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.engine.procs import ranks
from workbench.engine.metered_group import METHODS, Meter
from workbench.engine.world import Meeting, World

LATE_S = 0.2


def _world(rank: int, size: int, store: str, attempt: int = 0) -> World:
    if dist.is_initialized():
        dist.barrier()  # the other may still be connecting
        dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["WORKBENCH_DEVICE"] = "cpu"
    return World(Meeting(rank, size, attempt, store, 30.0, 20.0), Meter())


def _all_kinds(rank: int, store: str) -> dict[str, bool]:
    world = _world(rank, 2, store)
    ones, out = torch.ones(4), torch.empty(8)
    right = {}
    work = dist.all_reduce(ones, async_op=True)
    work.wait()
    right["all_reduce"] = bool((ones == 2).all())
    dist.broadcast(ones, 0)
    dist.all_gather_into_tensor(out, ones)
    right["all_gather"] = bool((out == 2).all())
    parts = [torch.empty(4) for _ in range(2)]
    dist.all_gather(parts, ones)
    half = torch.empty(4)
    dist.reduce_scatter_tensor(half, out)
    right["reduce_scatter"] = bool((half == 4).all())
    swapped = torch.empty(2)
    dist.all_to_all_single(swapped, torch.tensor([0.0, 1.0]))
    right["all_to_all"] = bool((swapped == rank).all())
    if rank == 0:
        dist.send(ones, 1)
    else:
        dist.recv(half, 0)
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    right["objects"] = objects == [{"rank": 0}, {"rank": 1}]
    group = dist.new_group([0, 1])
    dist.all_reduce(ones, group=group)
    dist.barrier()
    ops = world.meter.take()
    kinds = {op.kind for op in ops}
    right["counted"] = len(ops) >= 9 and sum(op.num_bytes for op in ops) > 100
    right["named"] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"} < kinds
    right["peers"] = [op.peer for op in ops if op.kind in ("send", "recv")] == [1 - rank]
    world.close()
    right["gone"] = not dist.is_initialized()
    return right


def test_every_kind_of_collective_goes_through_and_is_counted(tmp_path):
    for answers in ranks(2, _all_kinds, str(tmp_path / "store")):
        assert all(answers.values()), answers


class _Late(torch.autograd.Function):
    """Backward that sleeps, as a slow rank computes."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


def _step_held(rank: int, store: str, shard: bool) -> float:
    """Seconds that rank 0 is held in a step in which rank 1 is late."""
    from workbench.engine.blueprint import Plan
    from workbench.engine.recipe import from_namespace
    from workbench.engine.trainer import first_trainer
    from workbench.spec.layout import Layout
    from workbench.spec.options import TrainOptions
    from workbench.spec.records import COLUMNS, PARTS

    def loss(output, target):
        return _Late.apply(output, LATE_S if rank == 1 else 0.0).square().mean()

    def model():
        return torch.nn.Linear(8, 8)

    names = {"model": model, "data": lambda: (torch.ones(8, 8), torch.ones(8)), "loss": loss}
    world = _world(rank, 2, store)
    layout = Layout(dp_shard=2) if shard else Layout(dp_replicate=2)
    plan = Plan(from_namespace(names).changed(batch=8), TrainOptions())
    trainer = first_trainer(plan, layout, world)
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    trainer.run_steps(3, columns, follows=False)
    assert sum(columns[name][-1] for name in PARTS) <= columns["wall_s"][-1] * 1.001
    del trainer
    world.close()
    return columns["comm_s"][-1]


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_time_held_by_a_late_rank_is_exposed_communication(tmp_path, shard):
    early_s, late_s = ranks(2, _step_held, str(tmp_path / "store"), shard)
    assert early_s == pytest.approx(LATE_S, abs=0.15)
    assert late_s < early_s


def _bytes(rank: int, store: str) -> tuple[int, int]:
    world = _world(rank, 2, store)
    before = world.bytes_sent() or 0
    dist.all_reduce(torch.ones(250_000))
    dist.barrier()
    sent = (world.bytes_sent() or 0) - before
    world.close()
    return sent, 250_000 * 4


def test_bytes_sent_are_what_went_over_the_wire(tmp_path):
    """A ring of two sends 2 (n-1)/n = 1 times the payload from each."""
    for sent, payload in ranks(2, _bytes, str(tmp_path / "store")):
        assert 0.99 * payload < sent < 1.2 * payload  # the kernel counts what it sends again


def _freed(rank: int, store: str) -> float:
    world = _world(rank, 3, store)
    began_s = time.perf_counter()
    if rank == 2:
        time.sleep(0.3)
        world.free()
        world.close()
        return time.perf_counter() - began_s
    try:
        dist.all_reduce(torch.ones(10))
    except RuntimeError:
        world.free()  # as a rank does that was freed: the next one follows
    world.close()
    again = _world(rank, 2, store, attempt=1)  # the survivors meet without the third
    again.close()
    return time.perf_counter() - began_s


def test_a_rank_that_leaves_frees_those_that_wait(tmp_path):
    assert max(ranks(3, _freed, str(tmp_path / "store"))) < 5


def test_methods_that_torch_has_are_all_metered():
    from workbench.engine.metered_group import MeteredGroup

    for name in METHODS:
        if hasattr(dist.ProcessGroup, name):
            assert name in vars(MeteredGroup), name
    assert {"allreduce", "broadcast", "send", "recv", "barrier"} <= set(vars(MeteredGroup))


def _wrapped(rank: int, store: str) -> list[str]:
    world = _world(rank, 2, store)
    kinds = [type(dist.group.WORLD).__name__]
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    kinds.append(type(model.process_group).__name__)
    mesh = init_device_mesh("cpu", (2,))
    kinds.append(type(mesh.get_group()).__name__)
    fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    del model
    world.close()
    return kinds


def test_ddp_and_fsdp_meet_the_metered_group(tmp_path):
    for kinds in ranks(2, _wrapped, str(tmp_path / "store")):
        assert set(kinds) == {"MeteredGroup"}
