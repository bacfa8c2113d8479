"""CURVE: what notebook, controller and ranks say to each other encrypted (CurveZMQ).

Whoever has no key gets no connection. A signature alone says who spoke; but every user of the
machine may then connect, hear what is published, and with one short message make ipyparallel's
multiplexer lose the next one. The key is in the connection files (0600). What it costs lies within
the noise (docs/security.md). Without it only on loopback, and where that is asked for.

Source: http://curvezmq.org, https://rfc.zeromq.org/spec/26
"""

from __future__ import annotations

import ipaddress

import zmq


def is_needed(ip: str) -> bool:
    """Whether a controller that listens there can be reached from another machine."""
    return not ipaddress.ip_address(ip).is_loopback


def environment() -> dict[str, str]:
    """Environment of a controller that encrypts, with keys of its own; one started again with the
    same is the same to everybody.

    Not on a command line, which every user of the machine may read.
    """
    public, secret = zmq.curve_keypair()
    return {
        "IPP_ENABLE_CURVE": "1",
        "IPP_CURVE_PUBLICKEY": public.decode(),
        "IPP_CURVE_SECRETKEY": secret.decode(),
    }
