"""A real kernel for tests: cells in, what a front end would get out."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

TIMEOUT_S = 100


@dataclass
class Reply:
    """What one cell gave: status, streams, the error's lines, shown mime bundles."""

    status: str = ""
    out: str = ""
    err: str = ""
    error: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The plain text of what the cell displayed, and of its value."""
        shown = [*self.displays, *self.results]
        return "\n".join(data["text/plain"] for data in shown if "text/plain" in data)

    @property
    def panels(self) -> int:
        """How many widgets were shown."""
        view = "application/vnd.jupyter.widget-view+json"
        return sum(view in data for data in self.displays)


class Kernel:
    """One kernel, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = KernelManager(transport="ipc", ip=str(folder / "ipc"))
        self.manager.start_kernel(cwd=str(folder), stderr=subprocess.DEVNULL)
        self.client = self.manager.blocking_client()
        # Without the heartbeat, whose thread leaves an event loop behind.
        self.client.start_channels(hb=False)
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def __call__(self, code: str) -> Reply:
        """Run a cell."""
        reply = Reply()

        def hear(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                name = {"stdout": "out", "stderr": "err"}[content["name"]]
                setattr(reply, name, getattr(reply, name) + content["text"])
            elif kind == "display_data":
                reply.displays.append(content["data"])
            elif kind == "execute_result":
                reply.results.append(content["data"])
            elif kind == "error":
                reply.error = "\n".join(content["traceback"])

        told = self.client.execute_interactive(code, output_hook=hear, timeout=TIMEOUT_S)
        reply.status = told["content"]["status"]
        return reply

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of the code."""
        return self._asked(self.client.complete(code, len(code)))["matches"]

    def help(self, name: str) -> str:
        """What `name?` shows."""
        payload = self._asked(self.client.execute(f"{name}?"))["payload"]
        return payload[0]["data"]["text/plain"]

    def _asked(self, number: str) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") == number:
                return message["content"]

    def interrupt(self) -> None:
        """As the stop button does."""
        # Not the manager's way, which in a thread leaves an event loop behind.
        os.kill(self.manager.provisioner.pid, signal.SIGINT)

    def close(self, *, now: bool = True) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)
        self.manager.cleanup_resources()
        loop = ensure_event_loop()
        if not loop.is_running():  # a browser test's is, and is not ours
            loop.close()  # nobody else does; the next kernel gets another one
