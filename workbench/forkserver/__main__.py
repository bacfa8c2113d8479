"""`python -m workbench.forkserver SOCKET LEASE_S`: serve until no client is left for that long."""

from __future__ import annotations

import sys

from workbench.forkserver.server import Server

if __name__ == "__main__":
    Server(sys.argv[1], lease_s=float(sys.argv[2])).run()
