"""Tab in a real kernel, with jedi and without."""

from __future__ import annotations

import pytest
from kernel import Kernel

from workbench.spec.strategy import STRATEGIES


@pytest.fixture(scope="module", params=[True, False], ids=["jedi", "plain"])
def typing(kernel: Kernel, request: pytest.FixtureRequest) -> Kernel:
    kernel(f"get_ipython().Completer.use_jedi = {request.param}")
    return kernel


@pytest.mark.parametrize(
    ("code", "offered"),
    [
        ("%dist_start --nu", ["--num-ranks"]),
        ("%dist_start -n 2 --ti", ["--timeout"]),
        ("%dist_train dig", ["digits"]),
        ("x = 1\nrun = %dist_train py", ["pytext"]),
        ("%dist_train digits --strategy ", sorted(STRATEGIES)),
        ("%dist_train digits --precision=b", ["bf16"]),
        ("%%dist_train --sh", ["--shard"]),
        ("%dist_panel --lang e", ["en"]),
        ("%dist_restore la", ["last"]),
        ("%dist_restore digits-1/", ["digits-1/kept"]),
        ("%dist_train digits --restore digits-1/k", ["digits-1/kept"]),
        ("%dist_pau", ["%dist_pause"]),
    ],
)
def test_what_may_follow_is_offered(typing: Kernel, code: str, offered: list[str]):
    if "digits-1" in code and not (typing.folder / "runs" / "digits-1").exists():
        typing("%dist_start -n 1;\n%dist_train digits --steps 1 --wait;")
        typing("%dist_save kept;\n%dist_stop ;")
    assert typing.complete(code) == offered


def test_after_a_blank_names_come_with_the_options_not_yet_there(typing: Kernel):
    offered = typing.complete("%dist_train --steps 5 ")
    assert {"digits", "pytext", "--batch"} <= set(offered)
    assert "--steps" not in offered
    assert "digits" not in typing.complete("%dist_train digits ")


@pytest.mark.parametrize("code", ["%time dist_", "import o", "%%dist\nimport o"])
def test_other_lines_are_left_to_others(typing: Kernel, code: str):
    offered = typing.complete(code)
    assert not any(text.startswith("--") for text in offered)
