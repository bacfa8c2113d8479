"""`python stranger.py PORT ...`: another user, who says to each port what gloo's ranks say.

Prints one line when all is said, and holds the connections until its input ends.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

NOBODY = 65534
NUMBERS = 64  # gloo counts its connections from 0 on


def main() -> None:
    """Connect and wait."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    held = []
    for port in sys.argv[1:]:
        for number in range(NUMBERS):
            held.append(socket.create_connection(("127.0.0.1", int(port)), timeout=5))
            held[-1].sendall(struct.pack("<Q", number))
    print("said", flush=True)  # noqa: T201 - the test waits for it
    sys.stdin.read()


if __name__ == "__main__":
    # No resolver is asked for an address in numbers, but its codec is looked up: as root.
    "".encode("idna")
    main()
