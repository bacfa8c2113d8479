"""Law 1 for models a user brings: batch statistics, tied embeddings, Hugging Face."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.contract.batteries import Ranks, differences, on_ranks, plain
from tests.contract.test_live_switch import switched
from workbench.engine import recipe as recipes
from workbench.spec.layout import parse_layout
from workbench.spec.limits import why_not
from workbench.spec.options import TrainOptions

# Minutes on a busy machine, a quarter of that on a quiet one.
pytestmark = pytest.mark.timeout(900)

# One of each strategy, with what goes on inside of it, for four ranks.
WAY = (
    "dp4", "pp4, gpipe x1", "tp2", "pp2, 1f1b x4", "fsdp4", "pp2 dp2, 1f1b x2", "pp2 tp2, gpipe x2",
    "dp1", "dp2 tp2", "pp2 fsdp2, interleaved x2",
)  # fmt: skip


def _hugging_face(kind: str) -> recipes.Recipe:
    import transformers

    how = {"vocab_size": 40, "use_cache": False}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=3, n_embd=16, n_head=4, n_positions=8, resid_pdrop=0.1, attn_pdrop=0.0, **how
        )
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8, **how,
        )  # fmt: skip
    ids = torch.randint(40, (50, 8), generator=torch.Generator().manual_seed(1))
    names = {
        "model": lambda: transformers.AutoModelForCausalLM.from_config(config),
        "data": lambda: (ids, ids.roll(-1, 1)),
        "loss": lambda out, target: nn.functional.cross_entropy(
            out.logits.flatten(0, 1), target.flatten()
        ),
        "batch": 10,
    }
    return recipes.from_namespace(names)


def _recipe(name: str) -> recipes.Recipe:
    if name in ("gpt2", "llama"):
        recipe = _hugging_face(name)
    else:
        kind, _, size = name.partition(" ")
        recipe = recipes.builtin(kind, size or None).changed(batch=10)
    # Not Adam: where a gradient is nothing but rounding, its step would be made of that.
    return replace(recipe, lr=None, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))


def _goes_its_way(rank, store, name, exact):
    recipe, options = _recipe(name), TrainOptions()
    one = Ranks(rank, 4, store, recipe, options)
    trainer, found, told, way = None, [], [], []
    for text in WAY:
        layout = parse_layout(text)
        if exact and layout.microbatches > 1:
            continue
        if rank == 0:
            told.append(why_not(layout, one.blueprint.limits, 4))
        why: list = [told[-1] if rank == 0 else None]
        torch.distributed.broadcast_object_list(why, 0)
        if why[0]:
            continue
        trainer = switched(one, trainer, layout) if trainer else one.fresh(layout)
        found += one.steps(trainer, 1)
        way.append(text)
    if rank == 0:
        expected = plain(recipe, len(way), options)
        for text, step, right in zip(way, found, expected, strict=True):
            told += [f"{text}: {what}" for what in differences([step], [right])]
    one.close()
    return [what for what in told if what], way


@pytest.mark.parametrize("name", ["digits", "pytext tiny", "llama", "gpt2"])
def test_a_model_is_cut_every_way_and_switched_about(name):
    if name in ("gpt2", "llama"):
        pytest.importorskip("transformers")
    told, way = on_ranks(4, _goes_its_way, name, False)[0]
    cannot = "digits" if name == "digits" else ""
    refused = [what for what in told if "stages" in what and "needs" in what]
    assert [what for what in told if what not in refused and not (cannot and "tp" in what)] == []
    assert len(way) >= 6


def test_batch_statistics_are_those_of_the_whole_batch_where_it_is_one_microbatch():
    told, way = on_ranks(4, _goes_its_way, "digits cnn", True)[0]
    assert all("linear" in what or "tp" in what for what in told)
    assert {"dp4", "fsdp4", "pp4, gpipe x1", "dp1"} <= set(way)
