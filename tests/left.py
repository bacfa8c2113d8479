"""A training that a kernel leaves behind, killed by SIGKILL, for tests that attach to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys, time
from workbench.driver.engines import start
how = json.loads(sys.argv[1])
engines = start(how["n"], **how["start"])
if how["cell"] is not None:
    run = engines.train(cell=how["cell"], **how["train"])
print(json.dumps([row["pid"] for row in engines.status()]), flush=True)
exec(how["then"])
print("done", flush=True)
time.sleep(600)
"""


class Left:
    """A process in the place of a kernel; `kill` it, then attach."""

    def __init__(self, folder: Path, cell: str | None, n: int = 2, **how: Any) -> None:
        told = {"n": n, "cell": cell, "start": how.pop("start", {}), "then": how.pop("then", "")}
        told["train"] = {"directory": str(folder), "start": how.pop("runs", True), **how}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(told)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.pids: list[int] = json.loads(self.process.stdout.readline())

    def wait(self) -> None:
        """Until it has done what it was told to."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        """End it as a kernel that is killed."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.ended()

    def ended(self) -> None:
        """Until it has been killed."""
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
