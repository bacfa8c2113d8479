"""Checkpoints of ranks that hold different things: stages, boxes cut in two dims, nothing."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.procs import ranks
from tests.engine.test_moves import SHAPES, held, tensors, wrong
from workbench.engine import checkpoint
from workbench.engine.state import Piece
from workbench.errors import CheckpointError

# The last of each leaves ranks without anything.
LAYOUTS = ("dp4", "pp4", "tp4", "pp2 tp2", "fsdp2 tp2", "pp2 fsdp2", "fsdp3", "dp1")


def _saved_all(rank, root):
    for text in LAYOUTS:
        checkpoint.save(held(text, rank, filled=True), {"layout": text}, root, _name(text))


def _loaded_all(rank, root):
    """Keys that came back wrong, for each pair of layouts."""
    found = {}
    for saved, text in itertools.product(LAYOUTS, repeat=2):
        pieces = held(text, rank, filled=False)
        meta = checkpoint.load(root / _name(saved), pieces)
        found[saved, text] = (meta["layout"], wrong(pieces))
    return found


def _name(text):
    return text.replace(" ", "-")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One checkpoint of the same state for each layout."""
    directory = tmp_path_factory.mktemp("layouts")
    ranks(4, _saved_all, directory)
    return directory


def test_what_any_layout_saved_any_layout_restores(root):
    for answers in ranks(4, _loaded_all, root):
        assert answers == {(saved, text): (saved, []) for saved in LAYOUTS for text in LAYOUTS}


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_manifest_describes_the_whole_and_each_element_is_written_once(root, text):
    directory = root / _name(text)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert set(manifest["keys"]) == set(SHAPES)
    files = {file: load_file(directory / file) for file in manifest["files"]}
    places = [(file, key) for file, stored in files.items() for key in stored]
    assert len(places) == sum(len(entry["pieces"]) for entry in manifest["keys"].values())
    for key, tensor in tensors().items():
        entry = manifest["keys"][key]
        count, full = torch.zeros(tensor.shape), torch.zeros_like(tensor)
        assert entry["shape"] == list(tensor.shape)
        assert entry["dtype"] == str(tensor.dtype).removeprefix("torch.")
        for piece in entry["pieces"]:
            pairs = zip(piece["offset"], piece["shape"], strict=True)
            box = tuple(slice(first, first + size) for first, size in pairs)
            count[box] += 1
            full[box] = files[piece["file"]][piece["key"]]
        assert (count == 1).all()
        assert torch.equal(full, tensor)


def test_ranks_that_hold_nothing_write_no_file(root):
    assert [path.name for path in (root / "dp1").glob("rank-*")] == ["rank-0.safetensors"]
    assert len(list((root / "fsdp3").glob("rank-*"))) == 3


def _overlapping(rank, root):
    """Rank 0 has the whole, rank 1 the rows from 2 on, rank 2 the last column; as tied weights."""
    tensor = torch.arange(12.0).reshape(4, 3)
    offset = [(0, 0), (2, 0), (0, 2)][rank]
    local = tensor[offset[0] :, offset[1] :].clone()
    pieces = {"model/tied": Piece(local, offset, (4, 3))}
    checkpoint.save(pieces, {}, root, "a")
    pieces["model/tied"].local.zero_()
    checkpoint.load(root / "a", pieces)
    return torch.equal(local, tensor[offset[0] :, offset[1] :])


def test_boxes_that_overlap_are_written_once(tmp_path):
    assert ranks(3, _overlapping, tmp_path) == [True] * 3
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    pieces = manifest["keys"]["model/tied"]["pieces"]
    assert sum(torch.Size(piece["shape"]).numel() for piece in pieces) == 12
    assert len({(piece["file"], piece["key"]) for piece in pieces}) == len(pieces)


def _buffers(rank, root):
    own = torch.full((4,), float(rank))
    pieces = {"model/mean": Piece(own, (0,), (4,), buffer=True)} if rank else {}
    checkpoint.save(pieces, {}, root, "a")
    checkpoint.load(root / "a", pieces)
    return own.tolist()


def test_a_buffer_is_that_of_the_first_rank_that_holds_it(tmp_path):
    assert ranks(3, _buffers, tmp_path)[1:] == [[1.0] * 4] * 2


def _refused(rank, act, path, text, spoil):
    """The error of saving or loading a state that rank 1 spoils, and what else is there then."""
    pieces = held(text, rank, filled=act == "save")
    if rank == 1:
        spoil(pieces)
    try:
        if act == "save":
            checkpoint.save(pieces, {}, path, "spoiled")
        else:
            checkpoint.load(path, pieces)
    except CheckpointError as error:
        loaded = act == "load" and any(piece.local.any() for piece in pieces.values())
        return str(error), bool(loaded)


def _drop(pieces):
    pieces.pop("model/1.weight", None)


def _add(pieces):
    pieces["optim/1.weight/other"] = Piece(torch.zeros(()), (), ())


def _narrow(pieces):
    key = "model/1.weight"
    pieces[key] = Piece(pieces[key].local.half(), pieces[key].offset, pieces[key].shape)


def _reshape(pieces):
    pieces["model/1.weight"] = Piece(torch.zeros(5, 9), (0, 0), (5, 9))


@pytest.mark.parametrize(
    ("act", "text", "spoil", "said"),
    [
        ("load", "pp4", _drop, "is of another model: it has model/1.weight besides."),
        ("load", "pp4", _add, "is of another optimizer: it lacks optim/1.weight/other."),
        ("load", "pp4", _narrow, "has model/1.weight as float64, and here it is float16."),
        (
            "load",
            "dp4",
            _reshape,
            "model/1.weight is float64 [5, 8] on rank 0 and float32 [5, 9] on",
        ),
        ("save", "tp4", _drop, "do not hold model/1.weight: [5, 2] of its [5, 8] from [0, 2] on"),
        ("save", "dp4", _narrow, "model/1.weight is float64 [5, 8] on rank 0 and float16 [5, 8]"),
    ],
)
def test_what_one_rank_has_wrong_is_the_same_error_on_all(root, tmp_path, act, text, spoil, said):
    path = root / "fsdp2-tp2" if act == "load" else tmp_path
    answers = ranks(4, _refused, act, path, text, spoil)
    assert set(answers) == {answers[0]}
    assert said in answers[0][0]
    assert not answers[0][1]
    assert [item.name for item in tmp_path.iterdir() if item.name != ".lock"] == []
