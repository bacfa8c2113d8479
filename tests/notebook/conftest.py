"""One kernel with the extension for each module of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel import Kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    started = Kernel(tmp_path_factory.mktemp("kernel"))
    started("%load_ext workbench")
    yield started
    started("%dist_stop --all")
    started.close()


@pytest.fixture
def engines(kernel: Kernel) -> Kernel:
    """The kernel, with two ranks up."""
    assert kernel("%dist_start -n 2;").status == "ok"
    return kernel
