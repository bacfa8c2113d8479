"""Strangers: connections to this process that another user of the machine has opened.

gloo listens on the loopback interface and takes whoever sends the small number it waits for as its
peer: any user of the machine can be that. The kernel knows whose a local connection's other end is,
so a group looks before it works, and shuts down what is not of its own user. A connection that
nobody used is then gone; with one that gloo took for a peer the meeting of the ranks fails.

Source: Documentation/networking/proc_net_tcp.rst of Linux.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable

TABLES = "/proc/net/tcp", "/proc/net/tcp6"
MAPPED = "0000000000000000FFFF0000"  # before an address of IPv4 in the form of IPv6


def among(connections: Iterable[socket.socket]) -> list[socket.socket]:
    """Those whose other end is on this machine and of another user; none where nobody tells."""
    asked = {ends: one for one in connections if (ends := _ends(one)) is not None}
    if not asked:
        return []
    me, found = os.geteuid(), []
    for path in TABLES:
        for local, remote, uid in _rows(path):
            one = asked.get((remote, local))
            if one is not None and uid != me:
                found.append(one)
    return found


def _rows(path: str) -> Iterable[tuple[str, str, int]]:
    """Local address, remote address and user of every TCP connection, as the kernel writes them."""
    try:
        with open(path, encoding="ascii") as table:
            next(table)
            for line in table:
                fields = line.split()
                local, remote = (end.removeprefix(MAPPED) for end in fields[1:3])
                yield local, remote, int(fields[7])
    except (OSError, StopIteration):
        return


def _ends(connection: socket.socket) -> tuple[str, str] | None:
    """Own and other address of a connection as the kernel writes them; None for one cut off."""
    try:
        pair = connection.getsockname(), connection.getpeername()
    except OSError:
        return None
    own, other = (_written(connection.family, address[0], address[1]) for address in pair)
    return own, other


def _written(family: int, host: str, port: int) -> str:
    packed = socket.inet_pton(family, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)  # in the byte order of the machine
    text = "".join(f"{word:08X}" for word in words)
    return f"{text.removeprefix(MAPPED)}:{port:04X}"
