"""The product as the machine sees it: what listens, what others may read, where the keys are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel import Kernel

from tests.security import seen

LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@pytest.fixture(scope="module", params=["--no-curve", ""], ids=["signed", "curve"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Kernel]:
    started = Kernel(tmp_path_factory.mktemp("scanned"))
    started("import os; os.umask(0o022)")
    started("%load_ext workbench")
    said = [started(f"%dist_start -n 2 {request.param}").out]
    said.append(started("%dist_train digits --steps 100000 --save-every 20;").out)
    said += [started("%dist_step 40").out, started("%dist_status -v").text]
    said.append(started("%%dist\nprint('hello')").out)
    started.said = said  # type: ignore[attr-defined]
    yield started
    started("%dist_stop --all")
    started.close()


def scanned(kernel: Kernel) -> tuple[list[int], Path]:
    """All processes of the kernel, and the folder with their sockets."""
    pids = seen.family(int(kernel("import os; print(os.getpid())").out))
    folder = next(Path(p).parent for p in seen.unix_paths(pids) if p.endswith("/fork.sock"))
    return pids, folder


def said(kernel: Kernel, expression: str) -> Any:
    """The value of an expression in the kernel."""
    imports = "import json; from workbench.driver import audit, current"
    return json.loads(kernel(f"{imports}; print(json.dumps({expression}))").out)


def check_ports(kernel: Kernel) -> None:
    pids, _ = scanned(kernel)
    ports = seen.listening(pids)
    ranks = said(kernel, "[row['pid'] for row in current.engines().status()]")
    # Not a scan that sees nothing: the controller's ports and those of each rank are there.
    assert len(ports) > 10
    assert all(any(rank in holders for holders in ports.values()) for rank in ranks)
    assert [address for address in ports if not address.startswith(LOOPBACK)] == []


def test_all_ports_are_on_loopback_while_it_trains_and_after_a_switch(kernel: Kernel):
    kernel("%dist_resume")
    check_ports(kernel)
    for layout in ("pipeline", "data --shard", "tp2"):
        assert kernel(f"%dist_switch {layout}").status == "ok"
        check_ports(kernel)
    kernel("%dist_pause")


def test_unix_sockets_lie_where_nobody_else_may_enter(kernel: Kernel):
    pids, folder = scanned(kernel)
    names = seen.unix_paths(pids)
    assert f"{folder}/fork.sock" in names
    assert [name for name in names if name.startswith("@")] == []
    for name in names:
        assert any(parent.stat().st_mode & 0o077 == 0 for parent in Path(name).parents), name


def test_no_file_of_a_run_or_of_the_engines_may_be_read_by_others(kernel: Kernel):
    _, folder = scanned(kernel)
    run = next((kernel.folder / "runs").iterdir())
    assert list(run.glob("journal/*.jsonl"))
    assert list(run.glob("checkpoints/*/*"))
    assert folder.stat().st_mode & 0o777 == 0o700
    connections = list(folder.glob("*/security/*.json"))
    assert [path.stat().st_mode & 0o777 for path in connections] == [0o600, 0o600]
    assert [str(path) for place in (folder, run) for path in seen.open_to_others(place)] == []


def test_keys_are_on_no_command_line_and_in_no_output(kernel: Kernel):
    _, folder = scanned(kernel)
    infos = [json.loads(path.read_text()) for path in folder.glob("*/security/*.json")]
    keys = {info[name] for info in infos for name in ("key", "curve_serverkey") if info[name]}
    assert [len(key) for key in keys] in ([33], [40])
    texts = {"command lines": seen.command_lines(), "the notebook": str(kernel.said)}  # type: ignore[attr-defined]
    files = [*folder.rglob("*"), *(kernel.folder / "runs").rglob("*")]
    for path in files:
        if path.is_file() and path.parent.name != "security":
            texts[str(path)] = path.read_bytes().decode(errors="replace")
    assert len(texts) > 10
    assert [name for name, text in texts.items() if any(key in text for key in keys)] == []


def test_the_audit_lists_the_same_sockets(kernel: Kernel):
    pids, folder = scanned(kernel)
    found = {_port(address) for address in seen.listening(pids)}
    rows = said(kernel, "audit.sockets(current.engines())")
    listed = {int(row["socket"].rpartition(":")[2]) for row in rows if "/" not in row["socket"]}
    assert listed == found
    assert {row["socket"] for row in rows if "/" in row["socket"]} == {
        name for name in seen.unix_paths(pids) if name.startswith(f"{folder}/")
    }
    assert all(row["local"] for row in rows)
    text = kernel("%dist_audit").text
    assert "all on this machine alone" in text
    assert "other users may open" not in text
    assert ("CURVE" in text) == ("yes" in text)


def test_what_a_cell_opens_to_the_network_is_told(kernel: Kernel):
    opened = "import socket\nwide = socket.create_server(('0.0.0.0', 0))"
    kernel(f"%%dist --ranks 1\n{opened}")
    title = kernel("%dist_audit").text.splitlines()[0]
    kernel("%%dist --ranks 1\nwide.close()")
    assert "reached from other machines: rank 1 0.0.0.0:" in title


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
