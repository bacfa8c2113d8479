"""ranks(n, function, *args): a function on n real processes with a gloo group over loopback.

The processes are forked from a server that has imported torch once, so that a group costs a
fraction of a second. `function(rank, *args)` is a function of a test module's top level.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 30.0
# torch._dynamo: the first optimizer made in a process imports it, for most of a second.
PRELOADED = ["pytest", "numpy", "torch._dynamo", "torch.distributed.fsdp", "safetensors.torch"]


def ranks(num: int, function: Callable, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Results by rank. Raises AssertionError with the ranks' tracebacks; kills who is late.

    A rank that was killed gives None, when another has answered.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        pipes, processes = [], []
        for rank in range(num):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=((rank, num, store), theirs, function, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = _answers(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
                process.join()
    late = [rank for rank, answer in enumerate(answers) if answer == "late"]
    failed = [f"rank {rank}:\n{a[1]}" for rank, a in enumerate(answers) if a and a[0] == "error"]
    assert not failed, "\n".join(failed)
    assert not late, f"ranks {late} did not answer in {timeout_s} s"
    return [answer and answer[1] for answer in answers]


def _answers(pipes: list, deadline: float) -> list[Any]:
    answers: list[Any] = ["late"] * len(pipes)
    open_pipes: dict[Any, int] = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            try:
                answers[open_pipes[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[open_pipes[pipe]] = None
            del open_pipes[pipe]
    return answers


def _rank(place: tuple[int, int, str], pipe: Any, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    rank, num, store = place
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num),
            rank=rank,
            world_size=num,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        answer = ("result", function(rank, *args))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the test shows it, whatever it is
        answer = ("error", traceback.format_exc())
    # Not pipe.send: it would pass tensors as memory that ends with this process.
    pipe.send_bytes(pickle.dumps(answer))
