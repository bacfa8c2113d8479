"""What the operating system says of processes: sockets, command lines, modes of files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    top = psutil.Process(pid)
    return [pid, *(process.pid for process in top.children(recursive=True))]


def listening(pids: Iterable[int]) -> dict[str, list[int]]:
    """Address of each listening TCP socket, as the kernel writes it -> the processes that hold it.

    0100007F:1F90 is 127.0.0.1:8080.
    """
    holders = _holders(pids)
    found = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            fields = line.split()
            is_open = fields[3] == ("0A" if "tcp" in path else "07")
            if is_open and fields[9] in holders:
                found[fields[1]] = holders[fields[9]]
    return found


def unix_paths(pids: Iterable[int]) -> set[str]:
    """Names of Unix sockets that these processes hold."""
    holders = _holders(pids)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and row[6] in holders}


def _holders(pids: Iterable[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(file)
            except OSError:
                continue
            if target.startswith("socket:["):
                found.setdefault(target[8:-1], []).append(pid)
    return found


def command_lines() -> str:
    """All of the machine, in one text."""
    texts = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)


def open_to_others(folder: Path) -> Iterator[Path]:
    """Files, sockets and pipes below a folder that another user could open."""
    if not _may_enter(folder):
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from open_to_others(path)
        elif path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield path


def _may_enter(folder: Path) -> bool:
    return bool(folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
