import subprocess
import sys

import pytest

from workbench.driver import checkpoints
from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests


def write(root, name, step, time_s):
    (root / name).mkdir(parents=True)
    files = {"rank-0.safetensors": {"bytes": 10, "sha256": ""}, "rank-1.safetensors": {"bytes": 5}}
    facts = {"format": 1, "name": name, "time_s": time_s, "step": step, "layout": "dp2"}
    text = manifests.to_text({**facts, "recipe": "digits", "keys": {}, "files": files})
    (root / name / "manifest.json").write_text(text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "step-100", 100, 1.0)
    write(tmp_path, "best", 120, 3.0)
    write(tmp_path, "step-120", 120, 2.0)
    write(tmp_path, ".step-130.partial-0a", 130, 4.0)
    write(tmp_path, "broken", 140, 5.0)
    (tmp_path / "broken" / "manifest.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / ".lock").touch()
    return tmp_path


def test_the_list_has_whole_checkpoints_the_newest_last(root):
    found = checkpoints.list_in(root)
    assert [entry["name"] for entry in found] == ["step-100", "step-120", "best"]
    assert found[0] == {
        "name": "step-100",
        "step": 100,
        "time_s": 1.0,
        "bytes": 15,
        "layout": "dp2",
        "recipe": "digits",
        "by_itself": False,
        "path": str(root / "step-100"),
        "stall_ms": None,
        "write_ms": None,
    }
    assert checkpoints.list_in(root / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [("last", "best"), ("step-120", "step-120"), ("120", "best"), (100, "step-100")],
)
def test_a_name_a_step_or_last_is_found(root, text, name):
    assert checkpoints.find(root, text) == root / name


def test_a_path_is_taken_as_it_is(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert checkpoints.find(elsewhere, str(root / "best")) == root / "best"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step-12", "No checkpoint named 'step-12'. Did you mean 'step-120'? Known: best, step-1"),
        ("130", "No checkpoint of step 130. Steps saved: 100, 120."),
        ("broken", "Checkpoint broken is damaged: manifest.json is cut short or changed."),
        ("other", "is no checkpoint: it has no manifest.json."),
        ("/nowhere/x", "/nowhere/x is no checkpoint: it is not there."),
        ("..", "No checkpoint named '..'."),
    ],
)
def test_what_is_not_there_is_said_with_what_is(root, text, says):
    with pytest.raises(CheckpointError) as caught:
        checkpoints.find(root, text)
    assert says in str(caught.value)


def test_an_empty_root_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* yet"):
        checkpoints.find(tmp_path, "last")


def test_listing_loads_no_torch():
    code = "import sys, workbench.driver.checkpoints as c; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
