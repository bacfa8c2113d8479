"""Another user of the machine who speaks to gloo's ports: cut off, and never a rank's peer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.security.test_messages import wait_for
from workbench.engine import strangers
from workbench.engine.sockets import GroupSockets, open_sockets
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="root alone can be another user"
)


@contextlib.contextmanager
def stranger(*ports: int) -> Iterator[None]:
    """Another user's process, from when it has spoken to these ports on."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("stranger.py"))]
    with subprocess.Popen(
        [*command, *map(str, ports)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "said\n"
        yield
        process.stdin.close()


@pytest.fixture(params=["asked", "looked up"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel may not be asked, its tables are read."""
    if request.param == "looked up":
        monkeypatch.setattr(strangers, "NETLINK_SOCK_DIAG", 2**15)  # there is none of this number


@pytest.mark.usefixtures("_way")
def test_a_connection_tells_whose_it_is():
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as own:
            assert strangers.among([own]) == []
            with stranger(port), server.accept()[0] as foreign:
                assert strangers.among([own, foreign]) == [foreign]


@pytest.mark.usefixtures("_way")
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_it_does_so_with_ipv6():
    family = socket.AF_INET6
    with socket.create_server(("::", 0), family=family, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("::1", port)), server.accept()[0] as own:
            assert strangers.among([own]) == []
            with stranger(port), server.accept()[0] as foreign:
                assert strangers.among([own, foreign]) == [foreign]


def test_a_group_shuts_down_what_another_user_opened():
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        before = open_sockets()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as mine, server.accept()[0]:
            with stranger(port), server.accept()[0] as foreign:
                group = GroupSockets(before)
                assert group.num_strangers == 1
                assert len(group) == 2
                assert foreign.recv(100)[8:] == b""  # its number, and then the end
                mine.sendall(b"still there")
            group.close()


def ports(pid: int) -> set[int]:
    found = psutil.Process(pid).net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN and one.laddr}


@pytest.mark.parametrize("late", [0, 1])
def test_one_who_speaks_before_the_late_rank_does_not_get_its_place(clusters, late):
    engines = clusters(2)
    pids = [info["pid"] for info in engines.ranks]
    early = pids[1 - late]
    known = ports(early)
    os.kill(pids[late], signal.SIGSTOP)
    outcome: list[str] = []

    def meet() -> None:
        try:
            engines.rejoin()
            outcome.append("met")
        except WorkbenchError as error:
            outcome.append(str(error))

    meeting = threading.Thread(target=meet)
    meeting.start()
    try:
        opened = wait_for(lambda: ports(early) - known)
        with stranger(*opened):
            os.kill(pids[late], signal.SIGCONT)
            meeting.join(30)
    finally:
        os.kill(pids[late], signal.SIGCONT)
    assert outcome
    # Met without it, or not at all; and then once more.
    assert outcome[0] == "met" or "did not meet" in outcome[0]
    if outcome[0] != "met":
        engines.rejoin()
    assert engines.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values[0] == "2.0"
