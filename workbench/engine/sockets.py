"""The TCP connections of a gloo group: what went over them, and how to free a rank stuck in one.

gloo has no abort: a rank that waits for a peer that will never come waits until the time-out.
Shutting its own connections down makes every pending operation raise at once, here and, because
a peer then reads end-of-file, on the ranks that wait for this one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

from workbench.engine import strangers

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
    """The connections that appeared while groups were made: those not in `before`.

    num_strangers: how many of them were another user's, and are shut down.
    """

    def __init__(self, before: dict[int, str]) -> None:
        self._sockets: dict[str, socket.socket] = {}  # by inode
        self._gone_bytes = 0
        self._seen = before
        self._peers: set[str] = set()
        self.num_strangers = 0
        self.add(before)

    def add(self, before: dict[int, str]) -> None:
        """Those of one more group."""
        new: dict[str, socket.socket] = {}
        for fd, inode in open_sockets().items():
            if before.get(fd) == inode or inode in self._sockets:
                continue
            if connection := _connection(fd):
                new[inode] = connection
        foreign = strangers.among(new.values())
        for connection in foreign:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.num_strangers += len(foreign)
        own = {inode: one for inode, one in new.items() if one not in foreign}
        self._sockets |= own
        self._peers |= {_peer(one) for one in own.values()}
        self._seen = open_sockets()

    def look(self) -> None:
        """Those of groups that others made, and no longer those of groups that are gone.

        Whose they are is not known: what has been opened since, to where the other ranks are.
        """
        now = open_sockets()
        if sys.platform == "linux":
            inodes = list(now.values())
            self._forget([i for i in self._sockets if inodes.count(i) < 2])  # one is ours
        for fd, inode in now.items():
            if self._seen.get(fd) == inode or inode in self._sockets:
                continue
            if connection := _connection(fd):
                if _peer(connection) in self._peers:
                    self._sockets[inode] = connection
                else:
                    connection.close()
        self._seen = open_sockets()

    def _forget(self, inodes: list[str]) -> None:
        for inode in inodes:
            connection = self._sockets.pop(inode)
            self._gone_bytes += _bytes_sent(connection) or 0
            connection.close()

    def __len__(self) -> int:
        return len(self._sockets)

    def bytes_sent(self) -> int | None:
        """Bytes the kernel has sent over all connections so far; None where it does not count."""
        if sys.platform != "linux":
            return None
        total = self._gone_bytes
        for connection in self._sockets.values():
            num_bytes = _bytes_sent(connection)
            if num_bytes is None:
                return None
            total += num_bytes
        return total

    def shut_down(self) -> None:
        """Free whoever waits in an operation over these connections, here and at the peers."""
        for connection in list(self._sockets.values()):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed by the peer

    def close(self) -> None:
        """Let go of the descriptors held here; the group's own are its own."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets = {}


def _bytes_sent(connection: socket.socket) -> int | None:
    size = TCP_INFO_BYTES_SENT + 8
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if len(info) < size:
        return None
    return struct.unpack_from("Q", info, TCP_INFO_BYTES_SENT)[0]


def _peer(connection: socket.socket) -> str:
    """Address of the other end; "" where it has just gone."""
    try:
        return connection.getpeername()[0]
    except OSError:
        return ""


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
