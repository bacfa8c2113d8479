import json

import pytest

from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests


def test_plain_values_survive_and_others_are_named():
    value = {"a": (1, 2.5, None, True, "x"), 3: [float("inf")]}
    assert manifests.plain(value) == {"a": [1, 2.5, None, True, "x"], "3": [None]}
    with pytest.raises(CheckpointError, match=r"meta\.a\[0\] is a set, which a manifest cannot"):
        manifests.plain({"a": [set()]})


def test_a_manifest_is_read_as_written_and_every_change_is_noticed(tmp_path):
    facts = {"format": 1, "step": 5, "loss": 0.1, "keys": {}}
    path = tmp_path / "manifest.json"
    path.write_text(manifests.to_text(facts))
    read = manifests.read(tmp_path)
    assert {key: read[key] for key in facts} == facts
    path.write_text(path.read_text().replace('"step": 5', '"step": 6'))
    with pytest.raises(CheckpointError, match=r"manifest\.json was changed after"):
        manifests.read(tmp_path)


def test_a_manifest_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: Is a directory"):
        manifests.read(tmp_path)


def test_only_a_directory_with_a_manifest_and_no_dot_is_a_checkpoint(tmp_path):
    for name in ("whole", ".partial", "empty"):
        (tmp_path / name).mkdir()
    for name in ("whole", ".partial"):
        (tmp_path / name / "manifest.json").write_text(json.dumps({}))
    found = [path.name for path in tmp_path.iterdir() if manifests.is_checkpoint(path)]
    assert found == ["whole"]
