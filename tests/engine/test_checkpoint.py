import hashlib
import json
import os
import resource
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.engine.models import same, step, training, whole_state
from tests.engine.procs import ranks
from workbench.engine import checkpoint, state
from workbench.errors import CheckpointError
from workbench.spec import aside
from workbench.spec import manifest as manifests

META = {"step": 3, "samples": 96, "recipe": "odd", "layout": "dp2", "metrics": {"loss": 0.5}}


def _saved(rank, root, name, shard, *, steps=3):
    model, optim = training(shard=shard, steps=steps)
    groups = state.settings(optim, state.group_names(model, optim))
    meta = {**META, "tied": state.tied(model), "optimizer": groups}
    checkpoint.save(state.take(model, optim), meta, root, name)
    return whole_state(model, optim)


def _loaded(rank, path, shard, steps=0):
    model, optim = training(shard=shard, seed=9, steps=steps)
    pieces = state.take(model, optim)
    meta = checkpoint.load(path, pieces)
    state.load(model, optim, pieces)
    state.set_settings(optim, state.group_names(model, optim), meta["optimizer"])
    return whole_state(model, optim), meta


def _refused(rank, path, shard=False):
    """The error of a load, and whether it left the training as it was."""
    model, optim = training(shard=shard, seed=9)
    before = whole_state(model, optim)
    try:
        checkpoint.load(path, state.take(model, optim))
    except CheckpointError as error:
        return str(error), same(before, whole_state(model, optim))
    return None, False


def _saved_after(rank, root, steps):
    return _saved(rank, root, "a", False, steps=steps)


def alone(function, *args):
    """In this process, without a group."""
    return function(0, *args)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one process."""
    alone(_saved, tmp_path, "one", False)
    return tmp_path / "one"


def names_in(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("optimizer_steps", [0, 3])
def test_what_was_saved_is_restored_bit_equal_at_another_size_and_layout(tmp_path, optimizer_steps):
    path = tmp_path / "a"
    expected = ranks(2, _saved_after, tmp_path, optimizer_steps)[0]
    for num, shard in [(3, True), (1, False)]:
        for found, meta in ranks(num, _loaded, path, shard):
            assert same(expected, found)
            assert meta["metrics"] == {"loss": 0.5}


def test_sharded_is_restored_replicated_and_at_another_number_of_shards(tmp_path):
    path = tmp_path / "a"
    expected = ranks(3, _saved, tmp_path, "a", True)[0]
    for num, shard in [(2, False), (2, True)]:
        assert all(same(expected, found) for found, _ in ranks(num, _loaded, path, shard))
    assert same(expected, alone(_loaded, path, False)[0])


def test_training_on_after_a_restore_is_training_on(tmp_path):
    alone(_saved, tmp_path, "a", False)
    model, optim = training(steps=3)
    other, other_optim = training(seed=4)
    pieces = state.take(other, other_optim)
    checkpoint.load(tmp_path / "a", pieces)
    state.load(other, other_optim, pieces)
    step(model, optim, 2)
    step(other, other_optim, 2)
    assert same(whole_state(model, optim), whole_state(other, other_optim))


@pytest.mark.parametrize("shard", [False, True])
def test_each_element_is_written_once_and_the_bytes_are_shared_out(tmp_path, shard):
    ranks(3, _saved, tmp_path, "a", shard)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    sizes = []
    for file, facts in manifest["files"].items():
        raw = (tmp_path / "a" / file).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (facts["bytes"], facts["sha256"])
        held = load_file(tmp_path / "a" / file)
        sizes.append(sum(tensor.nbytes for tensor in held.values()))
        for key, tensor in held.items():
            boxes = [p for p in manifest["keys"][key]["pieces"] if p["file"] == file]
            assert [p["shape"] for p in boxes] == [list(tensor.shape)]
    total = sum(
        torch.Size(entry["shape"]).numel() * getattr(torch, entry["dtype"]).itemsize
        for entry in manifest["keys"].values()
    )
    assert sum(sizes) == total
    if not shard:
        assert max(sizes) - min(sizes) <= 140  # the largest tensor


def test_the_manifest_says_what_a_reader_asks(saved):
    manifest = manifests.read(saved)
    assert manifest["format"] == 1
    assert manifest["torch"] == torch.__version__
    assert manifest["tied"] == {"tied.weight": "first.weight"}
    assert manifest["optimizer"][0]["lr"] == 0.01
    assert manifest["keys"]["model/first.weight"] == {
        "shape": [7, 5],
        "dtype": "float32",
        "pieces": [
            {
                "file": "rank-0.safetensors",
                "key": "model/first.weight",
                "offset": [0, 0],
                "shape": [7, 5],
            }
        ],
    }
    modes = {path.stat().st_mode & 0o777 for path in saved.iterdir()}
    assert (saved.stat().st_mode & 0o777, modes) == (0o700, {0o600})


def test_a_name_that_exists_is_refused_or_made_unique(saved):
    before = (saved / "manifest.json").read_bytes()
    pieces = state.take(*training())
    with pytest.raises(CheckpointError, match="A checkpoint named 'one' exists"):
        checkpoint.save(pieces, META, saved.parent, "one")
    for expected in ("one-2", "one-3"):
        assert checkpoint.save(pieces, META, saved.parent, "one", unique=True) == expected
    assert names_in(saved.parent) == ["one", "one-2", "one-3"]
    assert (saved / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 101, "a b"])
def test_names_that_are_no_names_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        checkpoint.save(state.take(*training()), META, tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_meta_that_is_not_plain_is_refused_before_anything_is_written(tmp_path):
    pieces = state.take(*training())
    with pytest.raises(CheckpointError, match=r"meta\.x\[1\] is a object"):
        checkpoint.save(pieces, {"x": [1, object()]}, tmp_path, "a")
    with pytest.raises(CheckpointError, match="fields of the format itself: files"):
        checkpoint.save(pieces, {"files": 1}, tmp_path, "a")
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(pieces, {"loss": float("nan")}, tmp_path, "a")
    assert manifests.read(tmp_path / "a")["loss"] is None


def _small_files_only(rank, root):
    """Rank 1 may write 100 bytes a file: as a full disk, an error in the middle of a write."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        _saved(rank, root, "b", False)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_one_rank_that_cannot_write_is_the_same_error_on_all_and_leaves_nothing(tmp_path):
    ranks(2, _saved, tmp_path, "a", False)
    errors = ranks(2, _small_files_only, tmp_path)
    assert errors[0] == errors[1]
    assert "cannot be written in" in errors[0]
    assert "File too large" in errors[0]
    assert names_in(tmp_path) == ["a"]


def _save_error(rank, root):
    try:
        _saved(rank, root, "a", False)
    except CheckpointError as error:
        return str(error)


def test_a_root_that_cannot_be_made_is_the_same_error_on_all(tmp_path):
    (tmp_path / "file").write_text("")
    errors = ranks(2, _save_error, tmp_path / "file" / "root")
    assert errors[0] == errors[1]
    assert "cannot be written in" in errors[0]
    assert "Not a directory" in errors[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in (alone(_save_error, tmp_path) or "")


def _killed_at(root, event_number):
    """A save in a child that is killed at its n-th change of the file system; whether it was."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def watch(event, args):
            nonlocal seen
            changes = event in ("open", "os.mkdir", "os.rename", "os.remove")
            if changes and str(args[0]).startswith(str(root)):
                seen += 1
                if seen == event_number:
                    os.kill(os.getpid(), signal.SIGKILL)

        pieces = state.take(torch.nn.Linear(3, 3))
        sys.addaudithook(watch)
        try:
            checkpoint.save(pieces, META, root, "b")
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _kill_everywhere(rank, root):
    dist.destroy_process_group()  # Its threads do not survive a fork.
    lists = []
    for number in range(1, 100):
        if not _killed_at(root, number):
            return lists
        root.mkdir(exist_ok=True)  # The first kills come before it is made.
        visible = [path for path in root.iterdir() if manifests.is_checkpoint(path)]
        for path in visible:
            pieces = state.take(torch.nn.Linear(3, 3))
            checkpoint.load(path, pieces)
        lists.append(sorted(path.name for path in visible))
        if "b" in lists[-1]:
            (root / "b").rename(root / f"b{number}")


def test_a_kill_at_any_moment_leaves_the_old_list_or_the_new_one(tmp_path):
    root = tmp_path / "root"
    (lists,) = ranks(1, _kill_everywhere, root)
    assert len(lists) >= 8
    assert lists[0] == []
    assert lists[-1] != []  # the last kills come after the rename
    left = [name for name in names_in(root) if name.startswith(".")]
    assert left == []  # the save that was not killed swept what the others left


def _save_beside_a_dead_rank(rank, root):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        _saved(rank, root, "b", False)
    # The group is broken: end without the farewell that the other rank would have to answer.
    visible = names_in(root)
    (root / "seen").write_text(",".join(visible))
    os._exit(0)


def test_a_rank_killed_during_the_save_leaves_the_old_list(tmp_path):
    ranks(2, _saved, tmp_path, "a", False)
    ranks(2, _save_beside_a_dead_rank, tmp_path)
    assert (tmp_path / "seen").read_text() == "a"


def test_leftovers_of_a_writer_that_lives_are_kept(tmp_path):
    pieces = state.take(torch.nn.Linear(3, 3))
    for name in (".x.partial-00", ".y.partial-00"):
        (tmp_path / name).mkdir()
    lock = aside.lock(aside.lock_of(tmp_path / ".x.partial-00"))
    checkpoint.save(pieces, META, tmp_path, "a")
    assert names_in(tmp_path) == [".x.partial-00", ".x.partial-00.lock", "a"]
    os.close(lock)
    checkpoint.save(pieces, META, tmp_path, "b")
    assert names_in(tmp_path) == ["a", "b"]


def _flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("place", [0, 20, -1, -100])
@pytest.mark.parametrize("file", ["rank-0.safetensors", "manifest.json"])
def test_one_flipped_bit_is_found(saved, file, place):
    _flip(saved / file, place)
    text, unchanged = alone(_refused, saved)
    assert unchanged
    assert "Checkpoint one is damaged" in text or "is no checkpoint" in text
    assert file in text


def test_damage_that_one_rank_meets_is_the_same_error_on_all(tmp_path):
    ranks(2, _saved, tmp_path, "a", True)
    _flip(tmp_path / "a" / "rank-1.safetensors", -1)
    answers = ranks(2, _refused, tmp_path / "a", True)
    assert answers[0] == answers[1]
    assert answers[0] == (
        "Checkpoint a is damaged: rank-1.safetensors was changed after it was written. "
        "Restore another one.",
        True,
    )


@pytest.mark.parametrize("size", [0, 7, 300])
def test_a_file_cut_short_is_found_by_its_size(saved, size):
    os.truncate(saved / "rank-0.safetensors", size)
    assert f"rank-0.safetensors has {size} bytes instead of" in alone(_refused, saved)[0]


@pytest.mark.parametrize("size", [0, 100])
def test_a_manifest_cut_short_is_found(saved, size):
    os.truncate(saved / "manifest.json", size)
    assert "manifest.json is cut short or changed" in alone(_refused, saved)[0]


def test_what_is_no_checkpoint_is_refused_by_name(saved, tmp_path):
    assert "is no checkpoint: it is not there." in alone(_refused, tmp_path / "two")[0]
    (tmp_path / "two").mkdir()
    assert "is no checkpoint: it has no manifest.json." in alone(_refused, tmp_path / "two")[0]
    (tmp_path / "two" / "manifest.json").write_text("[]")
    assert "is no checkpoint: its manifest.json is of" in alone(_refused, tmp_path / "two")[0]
    (tmp_path / "two" / "manifest.json").write_text('{"format": 9}')
    assert "has format 9, this version reads 1" in alone(_refused, tmp_path / "two")[0]
    (saved / "rank-0.safetensors").unlink()
    assert "rank-0.safetensors cannot be read (No such file" in alone(_refused, saved)[0]


def test_a_manifest_that_points_elsewhere_is_refused(saved):
    text = (saved / "manifest.json").read_text().replace("rank-0.saf", "../rank-0.saf")
    manifest = json.loads(text)
    del manifest["seal"]
    (saved / "manifest.json").write_text(manifests.to_text(manifest))
    assert "manifest.json names '../rank-0.safetensors'" in alone(_refused, saved)[0]


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_what_differs(saved):
    model, _ = training()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="is of another optimizer: it has optim/back"):
        checkpoint.load(saved, state.take(model, sgd))
    with pytest.raises(CheckpointError, match="is of another model: it lacks model/weight; it has"):
        checkpoint.load(saved, state.take(torch.nn.Linear(3, 3, bias=False)))
    model.frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    optim = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"model/frozen has shape \[3\] there and \[4\] here"):
        checkpoint.load(saved, state.take(model, optim))
    with pytest.raises(CheckpointError, match="as float32, and here it is float64"):
        checkpoint.load(saved, state.take(*_double()))


def _double():
    model = training()[0].double()
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_dtypes_narrow_and_wide_come_back(tmp_path, dtype):
    module = torch.nn.Module()
    values = (torch.arange(12).reshape(3, 4) - 5).to(dtype)
    module.register_buffer("narrow", values.clone().t())  # not contiguous
    module.register_buffer("wide", torch.arange(5))
    module.register_buffer("empty", torch.zeros(0, 3))
    checkpoint.save(state.take(module), {}, tmp_path, "a")
    module.narrow.zero_()
    module.wide.zero_()
    checkpoint.load(tmp_path / "a", state.take(module))
    assert torch.equal(module.narrow, values.t())
    assert module.wide.tolist() == list(range(5))


def test_a_disk_too_small_is_said_before_writing(tmp_path):
    huge = state.Piece(torch.zeros(1).expand(2**50), (0,), (2**50,))
    with pytest.raises(CheckpointError, match=r"does not fit in .* [KMGT]?B are free"):
        checkpoint.save({"model/huge": huge}, {}, tmp_path, "a")
    assert names_in(tmp_path) == []
