"""Audit: every socket that listens for the engines, and who may speak there.

Read from the processes as the operating system sees them, so what a cell has opened is there, too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from workbench.driver import session
from workbench.forkserver import refused as refusals

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

# What the controller's ports are for, as its connection files name them.
PORTS = {
    "registration": "ranks and notebooks register",
    "control": "aborts and shutdown",
    "mux": "requests to ranks",
    "task": "tasks to any rank (not used)",
    "iopub": "output of ranks (not used)",
    "hb_ping": "heartbeat",
    "hb_pong": "heartbeat",
    "broadcast": "requests to many ranks (not used)",
    "notification": "news of ranks that come and go",
}
SIGNED = "who has the key: signed (HMAC-SHA256)"
CURVE = "who has the key: no connection else (CURVE)"
BEAT = "anybody on this machine; carries no data"
NEWS = "anybody on this machine reads; nothing is taken"
FOLDER = "this user: folder of mode 0700"
PEER = "this user: folder of mode 0700, asked of the system"
GROUP = "this user: others' connections are shut down"
UNKNOWN = "not known"


def sockets(engines: Engines) -> list[dict[str, Any]]:
    """Listening sockets of kernel, fork server, controller, ranks and what these started.

    Each a dict: owner, pid, socket (address or path), use, allowed (who may speak), encrypted,
    local (not reached from another machine).
    """
    uses, is_curve = _ports(engines)
    found: dict[str, dict[str, Any]] = {}
    for process, owner in _processes(engines):
        for address, port in _tcp(process):
            use = uses.get(port, "") or _own_use(owner)
            allowed, encrypted = _guard(owner, use, is_curve=is_curve)
            at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            local = ipaddress.ip_address(address).is_loopback
            row = {"owner": owner, "pid": process.pid, "socket": at, "use": use}
            # A fork inherits what its parent listens on: it is the parent's.
            found.setdefault(
                at, {**row, "allowed": allowed, "encrypted": encrypted, "local": local}
            )
        for path in _unix(process, engines.directory.parent):
            use, allowed = _unix_use(path)
            row = {"owner": owner, "pid": process.pid, "socket": path, "use": use}
            found.setdefault(path, {**row, "allowed": allowed, "encrypted": "no", "local": True})
    return list(found.values())


def refused(engines: Engines) -> dict[str, int]:
    """By owner how many messages and connections of strangers were refused."""
    owners = {process.pid: owner for process, owner in _processes(engines)}
    counts: Counter[str] = Counter()
    for pid, number in refusals.counted(engines.directory / "refused").items():
        counts[owners.get(pid, "a process that has ended")] += number
    return dict(counts)


def exposed(*folders: Path) -> list[Path]:
    """Files and sockets below these folders that other users may open."""
    return [path for folder in folders if _is_open(folder) for path in _open_below(folder)]


def _open_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not _is_open(path):
            continue
        if path.is_dir():
            yield from _open_below(path)
        else:
            yield path


def _is_open(path: Path) -> bool:
    """Whether others than the owner may enter this folder, or open this file."""
    mode = path.lstat().st_mode
    others = stat.S_IXGRP | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IRWXG | stat.S_IRWXO
    return bool(mode & others)


def _processes(engines: Engines) -> list[tuple[psutil.Process, str]]:
    """All that belong to the engines, parents first, with what they are called."""
    processes = engines.processes
    server = processes.forks.pid  # type: ignore[attr-defined]
    owners = {server: "fork server", processes.controller_pid: "controller"}  # type: ignore[attr-defined]
    owners |= {info["pid"]: f"rank {info['rank']}" for info in engines.ranks}
    found = [(psutil.Process(os.getpid()), "this process")]
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(server)
        found.append((top, owners[server]))
        for process in top.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                owners.setdefault(process.pid, owners.get(process.ppid(), "fork server"))
                found.append((process, owners[process.pid]))
    return found


def _ports(engines: Engines) -> tuple[dict[int, str], bool]:
    """What the controller's ports are for, and whether they speak CURVE."""
    uses: dict[int, str] = {}
    is_curve = False
    for kind in ("client", "engine"):
        file = engines.directory / "security" / f"ipcontroller-{kind}.json"
        info = json.loads(file.read_text())
        is_curve = bool(info.get("curve_serverkey"))
        for name, use in PORTS.items():
            ports = info.get(name) or []
            uses |= dict.fromkeys(ports if isinstance(ports, list) else [ports], use)
    return uses, is_curve


def _own_use(owner: str) -> str:
    """What a port is for that no connection file names."""
    if owner == "controller":
        return "between its own parts"
    if owner.startswith("rank"):
        return "collectives, or what a cell opened"
    return "the Jupyter kernel" if session.in_kernel() else "opened by this program"


def _guard(owner: str, use: str, *, is_curve: bool) -> tuple[str, str]:
    """Who may speak there, and whether it is encrypted."""
    if owner == "controller":
        open_to_all = {PORTS["hb_ping"]: BEAT, PORTS["notification"]: NEWS}
        plain = open_to_all.get(use, SIGNED)
        return (CURVE, "yes") if is_curve else (plain, "no")
    if owner.startswith("rank"):
        return GROUP, "no"
    return (SIGNED if session.in_kernel() else UNKNOWN), "no"


def _unix_use(path: str) -> tuple[str, str]:
    names = {"fork.sock": ("start and end of processes", PEER), "echo.sock": ("output", FOLDER)}
    return names.get(Path(path).name, ("between these processes", FOLDER))


def _tcp(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        found = process.net_connections("tcp")
    except psutil.Error:
        return []
    listening = [c.laddr for c in found if c.status == psutil.CONN_LISTEN and c.laddr]
    return sorted((address.ip, address.port) for address in listening)


def _unix(process: psutil.Process, folder: Path) -> list[str]:
    """Paths of the Unix sockets in our folder that a process holds."""
    try:
        found = process.net_connections("unix")
    except psutil.Error:
        return []
    return sorted({path for c in found if (path := str(c.laddr)).startswith(f"{folder}/")})
