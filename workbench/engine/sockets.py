"""The TCP connections of a gloo group: what went over them, and how to free a rank stuck in one.

gloo has no abort: a rank that waits for a peer that will never come waits until the time-out.
Shutting its own connections down makes every pending operation raise at once, here and, because
a peer then reads end-of-file, on the ranks that wait for this one.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

# struct tcp_info of Linux: 8 bytes of flags, 24 u32, then u64s; bytes_sent is the 13th of these.
# Source: include/uapi/linux/tcp.h (tcpi_bytes_sent, since Linux 4.19).
TCP_INFO_BYTES_SENT = 8 + 24 * 4 + 12 * 8


def open_sockets() -> dict[int, str]:
    """File descriptor to inode name of every socket of this process."""
    found = {}
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"/proc/self/fd/{name}") if sys.platform == "linux" else name
        except OSError:
            continue
        if sys.platform != "linux" or target.startswith("socket:"):
            found[int(name)] = target
    return found


class GroupSockets:
    """The connections that appeared while groups were made: those not in `before`."""

    def __init__(self, before: dict[int, str]) -> None:
        self._sockets: list[socket.socket] = []
        self.add(before)

    def add(self, before: dict[int, str]) -> None:
        """Those of one more group."""
        for fd, inode in open_sockets().items():
            if before.get(fd) != inode and (connection := _connection(fd)):
                self._sockets.append(connection)

    def __len__(self) -> int:
        return len(self._sockets)

    def bytes_sent(self) -> int | None:
        """Bytes the kernel has sent over all connections so far; None where it does not count."""
        if sys.platform != "linux":
            return None
        total = 0
        size = TCP_INFO_BYTES_SENT + 8
        for connection in self._sockets:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            if len(info) < size:
                return None
            total += struct.unpack_from("Q", info, TCP_INFO_BYTES_SENT)[0]
        return total

    def shut_down(self) -> None:
        """Free whoever waits in an operation over these connections, here and at the peers."""
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed by the peer

    def close(self) -> None:
        """Let go of the descriptors held here; the group's own are its own."""
        for connection in self._sockets:
            connection.close()
        self._sockets = []


def _connection(fd: int) -> socket.socket | None:
    """A second descriptor on a connected TCP socket; None for anything else."""
    try:
        found = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            found.getpeername()
            return found
    except OSError:
        pass
    found.close()
    return None
