"""What every benchmark says of the machine it ran on, and how it runs kernels and torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[1]


def where() -> dict[str, Any]:
    """Cores, Python and the versions that matter."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": version("torch"),
        "ipyparallel": version("ipyparallel"),
    }


def report(**figures: Any) -> None:
    """Print one JSON line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({**rounded, **where()}), flush=True)


def torchrun(num_ranks: int, script: str, *args: str) -> tuple[float, str]:
    """Run a rival under torchrun as a whole process -> (seconds, what it printed)."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(num_ranks), str(ROOT / "benchmarks" / "rivals" / script), *args,
    ]  # fmt: skip
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    began_s = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return time.perf_counter() - began_s, done.stdout


class Kernel:
    """A Jupyter kernel that runs cells, as a notebook does."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, code: str, timeout_s: float = 300.0) -> str:
        """Run a cell -> what it printed. Raises RuntimeError when the cell does."""
        printed: list[str] = []

        def take(message: dict) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, timeout=timeout_s, output_hook=take)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content'].get('evalue')}\n{''.join(printed)}")
        return "".join(printed)


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A fresh kernel, shut down at the end."""
    manager = KernelManager()
    manager.start_kernel(cwd=str(ROOT), env={**os.environ, "PYTHONPATH": str(ROOT)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
