"""What the fork server relies on in ipyparallel and ipykernel, held to its names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys

import pytest

from workbench.forkserver.children import PRELOAD


@pytest.mark.parametrize("name", PRELOAD)
def test_what_is_imported_ahead_exists(name):
    assert importlib.util.find_spec(name) is not None


def test_the_controller_sleeps_by_the_name_that_is_replaced():
    app = importlib.import_module("ipyparallel.controller.app")
    assert "time.sleep(" in inspect.getsource(app)
    assert inspect.ismodule(app.time)


def test_the_heart_beats_by_the_names_that_are_replaced():
    monitor = importlib.import_module("ipyparallel.controller.heartmonitor").HeartMonitor
    assert "PeriodicCallback(self.beat, self.period)" in inspect.getsource(monitor.start)
    assert "self.hearts" in inspect.getsource(monitor.beat)
    caller = importlib.import_module("tornado.ioloop").PeriodicCallback
    assert "self.callback_time" in inspect.getsource(caller._update_next)


def test_the_list_of_engines_is_kept_by_the_names_that_are_replaced():
    hub = importlib.import_module("ipyparallel.controller.hub").Hub
    assert "open(self.engine_state_file, 'w')" in inspect.getsource(hub._save_engine_state)
    assert "self._save_engine_state()" in inspect.getsource(hub.finish_registration)
    assert "self.finish_registration(" in inspect.getsource(hub._load_engine_state)


def test_status_messages_are_sent_by_the_method_that_is_replaced():
    kernel = importlib.import_module("ipyparallel.engine.kernel").IPythonParallelKernel
    names = list(inspect.signature(kernel._publish_status).parameters)
    assert names == ["self", "status", "channel", "parent"]


def test_the_client_has_the_names_that_mail_uses():
    client = importlib.import_module("ipyparallel").Client
    parameters = inspect.signature(client.send_apply_request).parameters
    assert {"socket", "f", "args", "ident", "metadata"} <= set(parameters)
    source = inspect.getsource(client)
    for name in (
        "_engines",
        "_mux_stream",
        "_iopub_socket",
        "history",
        "_output_futures",
        "_query_stream",
    ):
        assert f"{name} = " in source, name


def test_importing_all_of_it_leaves_one_thread():
    code = (
        "import importlib, os, warnings; warnings.simplefilter('ignore');"
        "from workbench.forkserver.children import PRELOAD;"
        "[importlib.import_module(name) for name in PRELOAD];"
        "print(len(os.listdir('/proc/self/task')))"
    )
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **env},
    )
    assert done.stdout.strip().splitlines()[-1] == "1"
