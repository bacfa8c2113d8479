"""Whoever has no key may knock at every port: nothing runs, it is counted, the training goes on."""

from __future__ import annotations

import json
import os
import socket as socket_module
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from ipyparallel.serialize import pack_apply_message
from jupyter_client.session import Session
from zmq.utils.monitor import recv_monitor_message

from workbench.driver import audit, curve
from workbench.driver.engines import Engines, start

LIMIT_S = 20.0
# Ports that take messages at all, by whose they are and how one speaks to them.
TAKING = [
    *(("client", name, zmq.DEALER) for name in ("registration", "control", "mux", "task")),
    ("client", "broadcast", zmq.DEALER),
    *(("engine", name, zmq.DEALER) for name in ("registration", "mux", "task", "broadcast")),
    ("engine", "iopub", zmq.PUB),
]
BAD_KEYS = {"unsigned": b"", "signed with another key": b"0" * 33}


def connections(engines: Engines) -> dict[str, dict[str, Any]]:
    """What is in the connection files, which the owner alone may read."""
    folder = engines.directory / "security"
    return {
        kind: json.loads((folder / f"ipcontroller-{kind}.json").read_text())
        for kind in ("client", "engine")
    }


def ports(engines: Engines, kind: str, name: str) -> list[int]:
    found = connections(engines)[kind][name]
    return found if isinstance(found, list) else [found]


def address(engines: Engines) -> bytes:
    """Of rank 0 at the controller: every user of the machine can hear it when a rank comes."""
    mail = engines.roster.mail
    assert mail is not None
    return mail._client._engines[engines.roster.members[0].id].encode()


@pytest.fixture
def knock() -> Iterator[Callable[..., None]]:
    """Send one request for `function(*args)` to a port, signed with a key."""
    context = zmq.Context()

    def send(port: int, kind: int, at: bytes, key: bytes, function: Callable, *args: Any) -> None:
        with context.socket(kind) as socket:
            socket.linger = 5_000
            assert connected(socket, f"127.0.0.1:{port}")  # before, a PUB socket would drop it
            if kind == zmq.PUB:
                time.sleep(0.2)  # a subscription arrives after the handshake, unseen
            buffers = pack_apply_message(function, args, {})
            session = Session(key=key, digest_history_size=0)
            session.send(socket, "apply_request", content={}, buffers=buffers, ident=[at])

    yield send
    context.destroy(linger=1_000)


def connected(socket: zmq.Socket, at: str) -> bool:
    """Connect; whether the other end took it."""
    outcomes = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    outcomes |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with socket.get_monitor_socket(outcomes | zmq.EVENT_DISCONNECTED) as events:
        socket.connect(f"tcp://{at}")
        assert events.poll(10_000), at
        event = recv_monitor_message(events)["event"]
        socket.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def tcp(at: str) -> socket_module.socket:
    host, _, port = at.rpartition(":")
    return socket_module.create_connection((host, int(port)), timeout=5)


def wait_for(reached: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := reached()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module", name="signed")
def _signed(clusters) -> Iterator[Engines]:
    """Ranks whose messages are signed, not encrypted."""
    clusters.stop()
    with start(2, curve=False) as engines:
        yield engines


def refused(engines: Engines) -> int:
    return sum(audit.refused(engines).values())


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_a_strangers_message_is_refused_and_counted_at_every_port(signed, tmp_path, knock, bad):
    run = signed.train("digits", steps=1_000_000, directory=tmp_path)
    for side, name, kind in TAKING:
        for port in ports(signed, side, name):
            before = refused(signed)
            canary = tmp_path / f"{side}-{name}-{port}"
            knock(port, kind, address(signed), BAD_KEYS[bad], Path.touch, canary)
            assert wait_for(lambda: refused(signed) > before), name  # noqa: B023
            assert not canary.exists(), name
    assert {"controller", "rank 0"} <= set(audit.refused(signed))
    reached = run.step_now
    assert wait_for(lambda: run.step_now > reached + 5)
    run.pause()
    assert signed.run_cell("1").values[0] == "1"
    assert run.switch("data", shard=True) == run.step_now


def test_the_same_message_with_the_key_runs(signed, tmp_path, knock):
    key = connections(signed)["client"]["key"].encode()
    canary = tmp_path / "ran"
    knock(*ports(signed, "client", "mux"), zmq.DEALER, address(signed), key, Path.touch, canary)
    assert wait_for(canary.exists)


def test_what_a_cell_prints_or_returns_is_heard_at_no_port(signed):
    context = zmq.Context()
    with context.socket(zmq.SUB) as ear:
        ear.linger = 0
        ear.subscribe(b"")
        for side, info in connections(signed).items():
            for name in audit.PORTS:
                for port in ports(signed, side, name) if info.get(name) else ():
                    ear.connect(f"tcp://127.0.0.1:{port}")
        assert ear.poll(5_000)  # the heartbeat: it hears
        signed.run_cell("print('sesame'); 'sesame'")
        heard = []
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            if ear.poll(100):
                heard.append(b"".join(ear.recv_multipart()))
    context.destroy(linger=0)
    assert heard
    assert not any(b"sesame" in message for message in heard)


@pytest.mark.parametrize("parts", [[b""], [b"x" * 1000], [b"<IDS|MSG>"], [b"<IDS|MSG>", b"{}"]])
def test_encrypted_nobody_gets_a_connection_and_what_is_no_message_harms_nobody(
    clusters, tmp_path, parts
):
    engines = clusters(2)
    run = engines.train("digits", steps=1_000_000, directory=tmp_path)
    rows = [row for row in audit.sockets(engines) if row["owner"] == "controller"]
    assert len(rows) > 10
    context = zmq.Context()
    for row in rows:
        before = refused(engines)
        assert row["encrypted"] == "yes"
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            assert not connected(socket, row["socket"]), row
        with tcp(row["socket"]) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"".join(parts))
        assert wait_for(lambda: refused(engines) > before), row  # noqa: B023
    context.destroy(linger=0)
    assert engines.call("is_broken") == [False, False]
    reached = run.step_now
    assert wait_for(lambda: run.step_now > reached + 5)
    run.pause()
    assert run.switch("pipeline") == run.step_now


def test_signed_alone_a_stranger_is_connected(signed):
    context = zmq.Context()
    (port,) = ports(signed, "client", "mux")
    with context.socket(zmq.DEALER) as socket:
        assert connected(socket, f"127.0.0.1:{port}")
    context.destroy(linger=0)


@pytest.mark.parametrize("how", [{"curve": True}, {"curve": False}], ids=["curve", "signed"])
def test_ranks_that_work_have_refused_nothing(clusters, tmp_path, how):
    clusters.stop()
    with start(2, **how) as engines:
        run = engines.train("digits", steps=6, directory=tmp_path)
        assert run.wait(60)["state"] == "finished"
        assert engines.run_cell("rank").values == {0: "0", 1: "1"}
        assert audit.refused(engines) == {}


@pytest.mark.parametrize(
    ("ip", "needed"), [("127.0.0.1", False), ("::1", False), ("10.1.2.3", True), ("0.0.0.0", True)]
)
def test_off_loopback_encryption_is_no_choice(ip, needed):
    assert curve.is_needed(ip) is needed


def test_keys_of_curve_are_new_each_time_and_in_no_environment_of_a_rank(clusters):
    assert curve.environment() != curve.environment()
    found = clusters(2).run_cell("import os; sorted(n for n in os.environ if 'CURVE' in n)")
    assert found.values == {0: "[]", 1: "[]"}
    assert not [name for name in os.environ if "IPP_CURVE" in name]
