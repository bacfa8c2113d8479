"""Stages of Hugging Face models, and stages wrapped by what spreads a model over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.engine.procs import ranks
from tests.engine.zoo import Tied
from workbench.engine.cut import cut, install, run
from workbench.engine.skeleton import skeleton

CPU = torch.device("cpu")
SMALL = {"vocab_size": 50, "use_cache": False, "max_position_embeddings": 16}
SMALL |= {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0)
    )


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, intermediate_size=32)
    )


@pytest.mark.filterwarnings("default")  # of another package, and its own affair
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize(("build", "tied"), [(gpt2, {"transformer.wte.weight"}), (llama, set())])
def test_hugging_face(build, tied, num):
    torch.manual_seed(0)
    model, ids = build(), torch.randint(0, 50, (2, 8))
    model.train()
    made = cut(skeleton(model), ids, num, device=CPU)
    assert set(made.tied) == (tied if num > 1 else set())
    losses, outputs = [], []
    for staged in (True, False):
        torch.manual_seed(1)
        output = ()
        for plan in made.stages if staged else ():
            output = run(plan, model, ids, output)
        output = output if staged else model(ids)
        losses.append(functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten()))
        outputs.append(output)
        losses[-1].backward()
    assert type(outputs[0]) is type(outputs[1])
    assert outputs[0].keys() == outputs[1].keys()
    assert torch.equal(*losses)


def _wrapped(how: str, part: nn.Module) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(part)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in part.blocks:  # type: ignore[union-attr]
        if next(block.parameters(), None) is not None:  # type: ignore[operator]
            fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(part, mesh=mesh)
    return part


def gradients_of_stages(rank: int, how: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Tied()
    inputs = torch.arange(8).view(2, 4)
    mine = inputs[rank : rank + 1]
    plans = cut(skeleton(model), mine, 2, device=CPU).stages
    parts = []
    for plan in plans:
        part = copy.deepcopy(model)
        install(plan, part)
        for block in part.blocks:
            if next(block.parameters(), None) is not None and how == "checkpoint":
                checkpoint(block)
        parts.append(part if how == "checkpoint" else _wrapped(how, part))
    sent = parts[0](mine)
    taken = tuple(tensor.detach().requires_grad_() for tensor in sent)
    parts[1](mine, taken).square().mean().backward()
    torch.autograd.backward(sent, [tensor.grad for tensor in taken])
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, param in part.named_parameters():
            grad = param.grad.full_tensor() if how == "fsdp" else param.grad
            key = name.removeprefix("module.")
            found[key] = found[key] + grad if key in found else grad
    if how == "checkpoint":
        for grad in found.values():
            dist.all_reduce(grad.div_(2))
    return found


@pytest.mark.parametrize("how", ["ddp", "fsdp", "checkpoint"])
def test_stages_can_be_wrapped(how):
    torch.manual_seed(0)
    model = Tied()
    model(torch.arange(8).view(2, 4)).square().mean().backward()
    for found in ranks(2, gradients_of_stages, how):
        assert found.keys() == {name for name, _ in model.named_parameters()}
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.grad)
