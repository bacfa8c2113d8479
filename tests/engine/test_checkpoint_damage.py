"""Damaged, swapped and hostile files in a checkpoint: never a wrong load, never code that runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch

from workbench.driver import checkpoints
from workbench.engine import checkpoint
from workbench.engine.state import Piece
from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests

FILE, MANIFEST = "rank-0.safetensors", "manifest.json"


def pieces(value=0.0):
    return {
        "model/a": Piece(torch.full((4, 3), value), (0, 0), (4, 3)),
        "model/b": Piece(torch.full((4, 3), value + 1), (0, 0), (4, 3)),
    }


@pytest.fixture
def root(tmp_path):
    """Two checkpoints of the same shapes, and a place where code that ran leaves a mark."""
    folder = tmp_path / "root"
    for name, value in (("good", 2.0), ("bad", 5.0)):
        checkpoint.save(pieces(value), {"step": int(value)}, folder, name)
    return folder


def refused(root, name="bad"):
    """What is said of it, after nothing has changed."""
    mine = pieces(-1.0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(root / name, mine)
    assert all(
        torch.equal(now.local, before.local)
        for now, before in zip(mine.values(), pieces(-1.0).values(), strict=True)
    )
    text = str(caught.value)
    assert "\n" not in text
    # The other one is not in doubt.
    checkpoint.load(root / "good", mine)
    assert mine["model/a"].local.unique().tolist() == [2.0]
    return text


class Bomb:
    """Touches a file wherever it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def resealed(path, **changes):
    """The manifest as somebody who may write the directory can make it."""
    manifest = {**manifests.read(path), **changes}
    del manifest["seal"]
    (path / MANIFEST).write_text(manifests.to_text(manifest))


def facts(path):
    raw = path.read_bytes()
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


@pytest.mark.parametrize("protocol", ["pickle", "torch"])
@pytest.mark.parametrize("is_resealed", [False, True])
@pytest.mark.parametrize("file", [FILE, MANIFEST])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_not_run(
    root, tmp_path, protocol, is_resealed, file
):
    mark, path = tmp_path / "ran", root / "bad" / file
    if protocol == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save(Bomb(mark), path)
    if is_resealed and file == FILE:
        resealed(root / "bad", files={FILE: facts(path)})
    assert "Checkpoint bad is damaged" in refused(root)
    assert not mark.exists()
    assert [entry["name"] for entry in checkpoints.list_in(root)] == (
        ["good", "bad"] if file == FILE else ["good"]
    )
    # It is one: outside of the workbench it would have run.
    with path.open("rb") as stream:
        if protocol == "pickle":
            pickle.load(stream)
        else:
            torch.load(stream, weights_only=False)
    assert mark.exists()


def test_files_swapped_between_two_checkpoints_are_refused(root):
    shutil.copy(root / "good" / FILE, root / "bad" / FILE)
    assert f"{FILE} was changed after it was written" in refused(root)


def test_a_manifest_of_another_checkpoint_is_refused(root):
    shutil.copy(root / "good" / MANIFEST, root / "bad" / MANIFEST)
    assert f"{FILE} was changed after it was written" in refused(root)


@pytest.mark.parametrize("file", [FILE, MANIFEST])
def test_empty_files_are_refused(root, file):
    (root / "bad" / file).write_bytes(b"")
    assert f"Checkpoint bad is damaged: {file}" in refused(root)


@pytest.mark.parametrize("file", [FILE, MANIFEST])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(root, file, make):
    (root / "bad" / file).unlink()
    make(root / "bad" / file)
    assert "bad" in refused(root)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "\xff\xfe",
        "null",
        '{"format": 1}',
        '{"format": 1, "keys": 3, "files": []}',
    ],
    ids=["deep", "no text", "nothing", "bare", "of other kinds"],
)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_manifest_of_another_make_is_refused(root, text, is_sealed):
    path = root / "bad" / MANIFEST
    path.write_text(text, encoding="latin-1")
    if is_sealed and text.startswith("{"):
        path.write_text(manifests.to_text(json.loads(text)))
    refused(root)
    assert [entry["name"] for entry in checkpoints.list_in(root)] == ["good"]


def _keys(root):
    return manifests.read(root / "bad")["keys"]


def _twice(keys):
    piece = {**keys["model/a"]["pieces"][0], "shape": [2, 3]}
    keys["model/a"]["pieces"] = [piece, piece]


def _too_little(keys):
    keys["model/a"]["pieces"][0]["shape"] = [2, 3]


def _nothing(keys):
    keys["model/a"]["pieces"] = []


def _elsewhere(keys):
    keys["model/a"]["pieces"][0]["file"] = "/etc/passwd"


def _another_key(keys):
    keys["model/a"]["pieces"][0]["key"] = "model/c"


def _numbers(keys):
    keys["model/a"]["pieces"][0]["offset"] = ["0", None]


@pytest.mark.parametrize(
    "change", [_twice, _too_little, _nothing, _elsewhere, _another_key, _numbers]
)
def test_a_manifest_that_misleads_is_refused(root, change):
    keys = _keys(root)
    change(keys)
    resealed(root / "bad", keys=keys)
    assert "Checkpoint bad is damaged" in refused(root)


def test_the_last_whole_one_is_named(root):
    (root / "bad" / FILE).write_bytes(b"")
    error = CheckpointError(refused(root))
    own = checkpoints.with_another(error, root / "bad", root)
    assert str(own).endswith("%dist_restore good is the last whole one.")
    other = checkpoints.with_another(error, root / "bad", root.parent)
    assert str(other).endswith(f"%dist_restore {root / 'good'} is the last whole one.")
    with (root / "good" / FILE).open("ab") as file:
        file.write(b"x")
    none = checkpoints.with_another(error, root / "bad", root)
    assert str(none).endswith(f"No other one in {root} is whole.")
    kept = CheckpointError("of another model")
    assert checkpoints.with_another(kept, root / "bad", root) is kept
