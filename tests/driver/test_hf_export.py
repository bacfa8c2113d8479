"""A checkpoint as Hugging Face's own files: from_pretrained reads what was trained."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from workbench.errors import CheckpointError, InputError
from workbench.spec import manifest as manifests

transformers = pytest.importorskip("transformers")

CELL = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
batch = 4

class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids):
        return self.net(ids).logits

def model():
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=1,
    )
    return Wrapped(GPT2LMHeadModel(config))

def data():
    ids = torch.randint(0, 32, (20, 12), generator=torch.Generator().manual_seed(0))
    return ids, ids

def loss(output, target):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())
"""


def whole_values(path):
    """The parameters of a checkpoint, put together by the manifest alone."""
    manifest = manifests.read(path)
    files = {name: load_file(path / name) for name in manifest["files"]}
    found = {}
    for key, entry in manifest["keys"].items():
        if key.startswith("model/"):
            whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            for piece in entry["pieces"]:
                pairs = zip(piece["offset"], piece["shape"], strict=True)
                box = tuple(slice(begin, begin + size) for begin, size in pairs)
                whole[box] = files[piece["file"]][piece["key"]]
            found[key.removeprefix("model/")] = whole
    return found


@pytest.mark.parametrize("strategy", [{}, {"shard": True}], ids=["replicated", "sharded"])
def test_from_pretrained_reads_the_trained_weights(clusters, tmp_path, strategy):
    run = clusters(2).train(cell=CELL, steps=3, directory=tmp_path, **strategy)
    run.wait(60)
    assert run.save("mine", export="hf") == "mine"
    folder = run.directory / "hf"
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert {path.name for path in (folder / "mine").iterdir()} >= {
        "config.json", "model.safetensors",
    }  # fmt: skip
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "mine")
    trained = whole_values(run.directory / "checkpoints" / "mine")
    found = {f"net.{name}": tensor for name, tensor in loaded.named_parameters()}
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    # Tied weights are there once, under Hugging Face's name.
    assert "lm_head.weight" not in load_file(folder / "mine" / "model.safetensors")


def test_a_model_of_another_make_is_refused_before_anything_is_written(clusters, tmp_path):
    run = clusters(2).train("digits", steps=1, directory=tmp_path)
    run.wait(60)
    with pytest.raises(CheckpointError, match="--export hf writes a model that has save_pretr"):
        run.save("mine", export="hf")
    with pytest.raises(InputError, match="export='onnx': use hf"):
        run.save("mine", export="onnx")
    assert run.checkpoints() == []
    assert run.save("mine") == "mine"


def test_an_export_that_cannot_be_written_leaves_the_checkpoint(clusters, tmp_path):
    run = clusters(2).train(cell=CELL, steps=1, directory=tmp_path)
    run.wait(60)
    (run.directory / "hf").write_text("in the way")
    with pytest.raises(CheckpointError, match="mine was saved, and not exported to"):
        run.save("mine", export="hf")
    assert [row["name"] for row in run.checkpoints()] == ["mine"]
