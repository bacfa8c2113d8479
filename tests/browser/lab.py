"""Real JupyterLab in headless Chromium, driven from a test.

`serve` starts a server whose settings, runtime files and home are in one private directory; `Lab`
is one browser page on it. Cells are run by JupyterLab's own command and not by keystrokes: the
page looks idle before its shortcuts and its kernel are wired, so a first Ctrl-Enter gets lost.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from playwright.sync_api import BrowserContext, Locator, Page, Playwright

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "workbench-test"
START_S = 60.0
STOP_S = 15.0
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Waits for the notebook `name` and its kernel, and keeps the widget for the other snippets.
READY = """async (name) => {
  const app = window.jupyterapp;
  await app.started;
  await app.restored;
  let found;
  for (let tries = 0; tries < 1200 && !found; tries++) {
    found = [...app.shell.widgets('main')]
      .find(w => w.context && w.context.path === name && w.sessionContext);
    if (!found) await new Promise(r => setTimeout(r, 50));
  }
  if (!found) throw new Error('no notebook named ' + name + ' opened');
  await found.revealed;
  await found.context.ready;
  await found.sessionContext.ready;
  const kernel = found.sessionContext.session?.kernel;
  if (kernel) await kernel.info;
  app.shell.activateById(found.id);
  window.__notebook = found;
}"""

# Resolves when the cell has finished.
RUN = """async (i) => {
  const app = window.jupyterapp, panel = window.__notebook, notebook = panel.content;
  app.shell.activateById(panel.id);
  notebook.activeCellIndex = i;
  notebook.deselectAll();
  await notebook.scrollToItem(i).catch(() => {});
  const good = await app.commands.execute('notebook:run-cell');
  return {good, count: notebook.widgets[i].model.executionCount};
}"""

RESTART = "async () => { await window.__notebook.sessionContext.restartKernel(); }"
SAVE = "async () => { await window.__notebook.context.save(); }"


def chromium() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: where it listens, the folder it serves and its private directory."""

    url: str
    root: Path
    private: Path

    def request(self, path: str, method: str = "GET") -> object:
        """One call of the server's REST interface; path such as `/api/kernels`."""
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"token {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def end_kernels(self) -> None:
        """Shut every kernel down as JupyterLab does, so that it may clean up after itself."""
        kernels = self.request("/api/kernels")
        assert isinstance(kernels, list)
        for kernel in kernels:
            self.request(f"/api/kernels/{kernel['id']}", "DELETE")


def _settings(private: Path, theme: str) -> None:
    """No news request, a theme, and a kernel that is this very Python."""
    extension = private / "settings" / "@jupyterlab" / "apputils-extension"
    extension.mkdir(parents=True)
    for name, value in {
        "notification": {"fetchNews": "false", "checkForUpdates": False},
        "themes": {"theme": theme},
    }.items():
        (extension / f"{name}.jupyterlab-settings").write_text(json.dumps(value))
    kernel = private / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))


def _environment(private: Path) -> dict[str, str]:
    """Nothing is read from the user's home, nothing is written there."""
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
        "HOME": "home",
    }
    env = {name: str(private / folder) for name, folder in places.items()}
    for folder in env.values():
        Path(folder).mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **env, "PYTHONPATH": path, "JUPYTER_PREFER_ENV_PATH": "0"}


def _wait_for_url(process: subprocess.Popen[bytes], private: Path) -> str:
    """The address that the server wrote down; it picks a free port itself."""
    note = private / "run" / f"jpserver-{process.pid}.json"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            port = json.loads(note.read_text())["port"]
            url = f"http://127.0.0.1:{port}"
            urllib.request.urlopen(f"{url}/api/status?token={TOKEN}", timeout=5).close()
        except (OSError, ValueError):
            time.sleep(0.05)  # between two looks at a file that another process writes
        else:
            return url
    log = (private / "server.log").read_text()
    raise AssertionError(f"JupyterLab did not answer within {START_S:g} s:\n{log}")


@contextmanager
def serve(root: Path, *, theme: str = "JupyterLab Light") -> Iterator[Server]:
    """JupyterLab on the folder `root`, as a process group of its own, ended with its kernels."""
    # Not below pytest's directory: the path of a socket has 107 bytes.
    private = Path(tempfile.mkdtemp(prefix="lab-"))
    _settings(private, theme)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"),
        "--allow-root",
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={root}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with (private / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=_environment(private),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(_wait_for_url(process, private), root, private)
        try:
            yield server
        finally:
            server.end_kernels()
    finally:
        _end(process)
        shutil.rmtree(private, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server's own group; its kernels have left it and were ended before."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


@dataclass
class Lab:
    """One browser page on one server.

    foreign: addresses outside this machine that the page asked for. complaints: errors of the
    page's console.
    """

    server: Server
    context: BrowserContext
    page: Page
    name: str = ""
    foreign: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("console", self._listen)

    def _note(self, url: str) -> None:
        if not url.startswith((self.server.url, "data:", "blob:", "ws://127.0.0.1")):
            self.foreign.append(url)

    def _listen(self, message) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def write(self, name: str, cells: Sequence[str]) -> str:
        """A notebook of these code cells in the served folder; returns its name."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, self.server.root / name)
        return name

    def open(self, name: str, *, workspace: str = "") -> None:
        """Open a notebook and wait until its kernel answers; a second page needs a workspace."""
        self.name = name
        tree = f"workspaces/{workspace}/tree" if workspace else "tree"
        self.page.goto(f"{self.server.url}/lab/{tree}/{name}?token={TOKEN}")
        self._ready()

    def reload(self) -> None:
        """What the user's reload does; the kernel goes on."""
        self.page.evaluate(SAVE)
        self.page.reload()
        self._ready()

    def _ready(self) -> None:
        self.page.wait_for_function("() => !!window.jupyterapp")
        self.page.evaluate(READY, self.name)

    def second(self) -> Lab:
        """The same notebook in another tab, on the same kernel."""
        self.page.evaluate(SAVE)  # the other tab reads the outputs from the file
        tab = Lab(self.server, self.context, self.context.new_page())
        tab.page.set_default_timeout(START_S * 1000)
        tab.open(self.name, workspace="second")
        return tab

    def run(self, index: int) -> bool:
        """Run one cell, counted with the markdown cells; returns when it has finished.

        False when it raised.
        """
        return self.page.evaluate(RUN, index)["good"]

    def cell(self, index: int) -> Locator:
        """Where to look for what a cell shows, e.g. `.get_by_role("button", name="Pause")`.

        Text is found in the cell's source, too: look for roles, or for classes of the output.
        """
        return self.page.locator(f'.jp-Notebook-cell[data-windowed-list-index="{index}"]')

    def output(self, index: int) -> str:
        """All text a cell's output shows."""
        return "\n".join(self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def restart_kernel(self) -> None:
        """Restart the kernel without asking; cells and outputs stay."""
        self.page.evaluate(RESTART)

    def screenshot(self, path: Path | str) -> None:
        """The page as it is shown, as a PNG."""
        self.page.screenshot(path=str(path))


@contextmanager
def browse(
    playwright: Playwright, server: Server, *, width: int = 1920, height: int = 1080
) -> Iterator[Lab]:
    """A page in a Chromium with an empty profile."""
    context = playwright.chromium.launch_persistent_context(
        tempfile.mkdtemp(prefix="chromium-", dir=server.private),
        executable_path=chromium(),
        headless=True,
        args=list(CHROMIUM_FLAGS),
        viewport={"width": width, "height": height},
    )
    context.set_default_timeout(START_S * 1000)
    try:
        yield Lab(server, context, context.pages[0] if context.pages else context.new_page())
    finally:
        context.close()
