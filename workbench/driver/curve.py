"""CURVE: messages between notebook, controller and ranks encrypted (CurveZMQ), where asked for.

Always where the controller could be reached from another machine: a signature says who spoke, but
what was said can be read on the way. The key that lets one speak is in the connection files (0600).

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
