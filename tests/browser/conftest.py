"""JupyterLab for the tests of this folder; without Chromium they skip, in CI they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from lab import Lab, Server, browse, chromium, serve
from playwright.sync_api import Playwright, sync_playwright

from workbench.driver import session


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    if chromium() is None:
        reason = "NO CHROMIUM FOUND, no browser test ran. Debian: apt install chromium."
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, playwright: Playwright) -> Iterator[Server]:
    """JupyterLab on an empty folder, shared by the tests of a module."""
    with serve(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def lab(server: Server, playwright: Playwright) -> Iterator[Lab]:
    """A fresh browser on the module's server; the test's kernels end with it, and their ranks."""
    with browse(playwright, server) as lab:
        yield lab
    server.end_kernels()
    session.end_abandoned()
