"""What goes over groups that the user's code makes is sent, and who waits in one can be freed."""

from __future__ import annotations

import os
import socket
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.procs import ranks
from workbench.engine.metered_group import Meter
from workbench.engine.sockets import open_sockets
from workbench.engine.world import Meeting, World

NUMBERS = 250_000
PAYLOAD_BYTES = 4 * NUMBERS
ELSEWHERE = "127.0.0.2"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bytes are counted by Linux")


def _world(rank: int, size: int, store: str) -> World:
    dist.barrier()  # the other may still be connecting
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["WORKBENCH_DEVICE"] = "cpu"
    return World(Meeting(rank, size, 0, store, 30.0, 20.0), Meter())


def _sent(world: World) -> int:
    found = world.bytes_sent()
    assert found is not None
    return found


class Summing(torch.optim.SGD):
    """Sums something of its own in a group of its own."""

    group = None

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """torch's, after the sum."""
        if self.group is None:
            self.group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(NUMBERS), group=self.group)
        super().step(closure)


def _step_sent(rank: int, store: str) -> list[int]:
    """What three steps sent of a training that sums something of its own."""
    from workbench.engine.blueprint import Plan
    from workbench.engine.recipe import from_namespace
    from workbench.engine.trainer import first_trainer
    from workbench.spec.layout import Layout
    from workbench.spec.options import TrainOptions
    from workbench.spec.records import COLUMNS

    names = {
        "model": lambda: torch.nn.Linear(8, 1),
        "data": lambda: (torch.ones(8, 8), torch.ones(8, 1)),
        "loss": torch.nn.functional.mse_loss,
        "optimizer": lambda params: Summing(params, lr=0.01),
    }
    world = _world(rank, 2, store)
    plan = Plan(from_namespace(names).changed(batch=8), TrainOptions())
    trainer = first_trainer(plan, Layout(dp_replicate=2), world)
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    trainer.run_steps(3, columns, follows=False)
    del trainer
    world.close()
    return columns["sent_bytes"]


def test_a_step_has_sent_what_went_over_the_users_own_group(tmp_path):
    for sent in ranks(2, _step_sent, str(tmp_path / "store")):
        assert all(0.99 * PAYLOAD_BYTES < one < 1.2 * PAYLOAD_BYTES for one in sent), sent


def _comes_and_goes(rank: int, store: str) -> tuple[list[int], list[int]]:
    """Bytes sent and sockets open after each of some groups, which last for one operation."""
    world = _world(rank, 2, store)
    sent, num_open = [_sent(world)], []
    for _ in range(5):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(NUMBERS), group=group)
        dist.barrier()
        sent.append(_sent(world))
        assert isinstance(group, dist.ProcessGroup)
        dist.destroy_process_group(group)
        dist.barrier()
        num_open.append(len(open_sockets()))
    world.close()
    return sent, num_open


def test_a_group_that_is_gone_leaves_its_count_and_no_connection(tmp_path):
    for sent, num_open in ranks(2, _comes_and_goes, str(tmp_path / "store")):
        for before, after in pairwise(sent):
            assert 0.99 * PAYLOAD_BYTES < after - before < 1.2 * PAYLOAD_BYTES
        assert num_open[-1] <= num_open[0], num_open


def _to_elsewhere(rank: int, store: str) -> tuple[int, int]:
    """Connections that count, before and after the user opens one and makes a group."""
    world = _world(rank, 2, store)
    before = len(world.sockets)
    server = socket.create_server((ELSEWHERE, 0))
    with server, socket.create_connection(server.getsockname()):
        dist.new_group([0, 1])
        world.bytes_sent()
        after = len(world.sockets)
    dist.barrier()
    world.close()
    return before, after


def test_a_connection_to_elsewhere_is_none_of_a_group(tmp_path):
    for before, after in ranks(2, _to_elsewhere, str(tmp_path / "store")):
        assert after == before + 1


def _freed(rank: int, store: str) -> float:
    world = _world(rank, 2, store)
    group = dist.new_group([0, 1])
    began_s = time.perf_counter()
    if rank == 1:
        time.sleep(0.3)
        world.free()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(10), group=group)
    took_s = time.perf_counter() - began_s
    world.close()
    return took_s


def test_who_waits_in_the_users_group_is_freed(tmp_path):
    assert max(ranks(2, _freed, str(tmp_path / "store"))) < 5
