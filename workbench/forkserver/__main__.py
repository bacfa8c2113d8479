"""`python -m workbench.forkserver SOCKET LEASE_S`: serve until the last client is gone for LEASE_S."""

from __future__ import annotations

import sys

from workbench.forkserver.server import Server

if __name__ == "__main__":
    Server(sys.argv[1], lease_s=float(sys.argv[2])).run()
