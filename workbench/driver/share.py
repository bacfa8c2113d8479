"""Share: the kernel that controls ranks shows their training to other notebooks.

A Unix socket (0600) in the cluster's private directory (0700); each line is a request in JSON, each
is answered by one. A thread waits there for somebody to come: without watchers that is all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver.handover import hand_over
from workbench.driver.here import this_notebook
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

NAME = "share.sock"


class Share:
    """The door for other notebooks of one cluster; open until `close`."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._path = engines.directory / NAME
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._path.unlink(missing_ok=True)  # of a kernel that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._accept, name="share", daemon=True)
        self._thread.start()

    def shut(self) -> None:
        """Let nobody in any more, and free the address; who is here stays."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as bell:
            bell.connect(str(self._path))
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let nobody in, and end the connections there are."""
        self.shut()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._is_closed:
                connection.close()
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, ValueError),
            connection,
            connection.makefile("rwb") as lines,
        ):
            for line in lines:
                request = json.loads(line)
                answer = self._answer(request)
                if self._is_closed and request["op"] != "take":
                    break
                lines.write(json.dumps(answer, default=str).encode() + b"\n")
                lines.flush()
        self._connections.discard(connection)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "take":
                pid, started = request["kernel"]
                hand_over(self._engines, (int(pid), float(started)), str(request["who"]))
                return {}
            return self._look(request["version"])
        except WorkbenchError as error:
            return {"error": str(error)}

    def _look(self, seen: str) -> dict[str, Any]:
        """The snapshot of the training, unless it is the one that was seen."""
        run = self._engines.run
        told = {"who": this_notebook(), "version": "", "snapshot": None}
        if run is None:
            return told
        # The version first: what changes between the two is sent once more, never lost.
        version = f"{run.name} {run.version}"
        return {
            **told,
            "version": version,
            "snapshot": run.snapshot() if version != seen else None,
        }


def at(directory: Path) -> Path:
    """Where the door of a cluster is."""
    return directory / NAME
