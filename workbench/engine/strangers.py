"""Strangers: connections to this process that another user of the machine has opened.

gloo listens on the loopback interface and takes whoever sends the small number it waits for as its
peer: any user of the machine can be that. The kernel knows whose a local connection's other end is,
so a group looks before it works, and shuts down what is not of its own user. A connection that
nobody used is then gone; with one that gloo took for a peer the meeting of the ranks fails.

Source: sock_diag(7) and Documentation/networking/proc_net_tcp.rst of Linux.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable, Sequence

TABLES = "/proc/net/tcp", "/proc/net/tcp6"
MAPPED = "0000000000000000FFFF0000"  # before an address of IPv4 in the form of IPv6
# Of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
NETLINK_SOCK_DIAG, NLM_F_REQUEST, NLMSG_ERROR, SOCK_DIAG_BY_FAMILY = 4, 1, 2, 20
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
ENDS = struct.Struct("!HH16s16s")  # ports and addresses of one connection, own before other
NO_COOKIE = struct.pack("=III", 0, 2**32 - 1, 2**32 - 1)  # behind them: any interface, any cookie
UID_AT = HEADER.size + 4 + ENDS.size + len(NO_COOKIE) + 12


def among(connections: Iterable[socket.socket]) -> list[socket.socket]:
    """Those whose other end is on this machine and of another user; none where nobody tells."""
    chosen = list(connections)
    if sys.platform != "linux" or not chosen:
        return []
    try:
        owners = _asked(chosen)
    except OSError:  # a container may forbid to ask
        owners = _looked_up(chosen)
    me = os.geteuid()
    return [one for one, uid in zip(chosen, owners, strict=True) if uid not in (None, me)]


def _asked(connections: Sequence[socket.socket]) -> list[int | None]:
    """By connection the user of its other end, asked of the kernel; None for one elsewhere.

    A tenth of a millisecond each; a busy machine's table takes ten to read.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        return [_owner(kernel, one) for one in connections]


def _owner(kernel: socket.socket, connection: socket.socket) -> int | None:
    try:
        own, other = connection.getsockname(), connection.getpeername()
    except OSError:
        return None  # cut off
    own_host, other_host = (
        socket.inet_pton(connection.family, end[0]).ljust(16, b"\0") for end in (own, other)
    )
    # It is the other end that is asked for, whose own address is the other one.
    asked = REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, 2**32 - 1)
    asked += ENDS.pack(other[1], own[1], other_host, own_host) + NO_COOKIE
    length = HEADER.size + len(asked)
    kernel.send(HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + asked)
    reply = kernel.recv(4096)
    if HEADER.unpack_from(reply)[1] != NLMSG_ERROR:
        return struct.unpack_from("=I", reply, UID_AT)[0]
    (code,) = struct.unpack_from("=i", reply, HEADER.size)
    if code == -errno.ENOENT:
        return None
    raise OSError(-code, os.strerror(-code))


def _looked_up(connections: Sequence[socket.socket]) -> list[int | None]:
    """The same from the tables of all connections."""
    ends = [_ends(one) for one in connections]
    found: dict[tuple[str, str], int] = {}
    for path in TABLES:
        for local, remote, uid in _rows(path):
            found[remote, local] = uid
    return [None if pair is None else found.get(pair) for pair in ends]


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
