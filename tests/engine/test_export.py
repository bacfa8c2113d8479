"""A script gives the losses of one plain process, needs torch alone, and reads like code."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.contract.batteries import plain
from tests.engine.export_recipes import CLASS, FROZEN, FUNCTION, GPT
from tests.engine.procs import ranks
from workbench.engine import recipe as recipes
from workbench.engine.blueprint import Blueprint, Plan
from workbench.engine.data import fixed_random
from workbench.engine.export import script
from workbench.errors import LayoutError, RecipeError
from workbench.spec.layout import parse_layout
from workbench.spec.options import TrainOptions

STEPS = 3
PLAN = {"*.up": "colwise", "*.down": "rowwise", "token": "vocab", "head": "gathered"}
PLANNED = f"{GPT}\n\ntensor_plan = {PLAN}\n".replace("'", '"')
CELLS = {"gpt": GPT, "planned": PLANNED, "class": CLASS, "function": FUNCTION, "frozen": FROZEN}
BIN = Path(sys.executable).parent
CLIP = {"clip": 0.05, "accumulate": 2}
# (recipe, layout, options of the training)
CASES = {
    1: [
        ("digits mlp", "dp1", {}),
        ("pytext tiny", "dp1", {**CLIP, "recompute": True}),
        ("class", "dp1", {}),
        ("function", "dp1", {"precision": "bf16"}),
    ],
    2: [
        *((f"digits {size}", each, {}) for size in ("mlp", "cnn") for each in ("dp2", "fsdp2")),
        *((f"digits {size}", each, {}) for size in ("mlp", "cnn") for each in ("pp2", "tp2")),
        ("digits mlp", "pp2, 1f1b x4", {}),
        ("pytext tiny", "pp2, 1f1b x4", {}),
        ("pytext tiny", "dp2", {"recompute": True, "batch": 4}),
        ("class", "dp2", {"batch": 7}),
        ("class", "fsdp2", {"accumulate": 3}),
        ("class", "pp2, gpipe x2", {"clip": 0.1}),
        ("function", "dp2", {"batch": 11}),
        ("gpt", "tp2", CLIP),
        ("planned", "tp2", CLIP),
        ("gpt", "pp2, zbv x2", CLIP),
        ("frozen", "pp2, zbv x2", {}),
        ("frozen", "pp2, dualpipev x4", {}),
        ("gpt", "pp2, interleaved x2", {}),
    ],
    4: [
        ("digits mlp", "pp2 dp2, 1f1b x2", {}),
        ("gpt", "pp2 dp2, gpipe x2", CLIP),
        ("gpt", "pp2 tp2, 1f1b x2", CLIP),
        ("planned", "pp2 tp2, gpipe x2", CLIP),
        ("gpt", "fsdp2 tp2", CLIP),
        ("gpt", "dp2 tp2", CLIP),
        ("gpt", "dp2 fsdp2", CLIP),
        ("gpt", "pp2 fsdp2, 1f1b x2", CLIP),
        ("gpt", "pp4, 1f1b x4", CLIP),
    ],
}
ALL = [(size, case) for size, cases in CASES.items() for case in cases]


def made(name: str) -> tuple[recipes.Recipe, str | None, dict]:
    """A recipe, the text of its cell, and the namespace it was executed in."""
    kind, _, size = name.partition(" ")
    if kind not in CELLS:
        return recipes.builtin(kind, size or None), None, {}
    space: dict = {"__name__": "__main__"}
    with fixed_random(0):
        exec(compile(CELLS[kind], "<cell 1>", "exec"), space)
    own = {key: value for key, value in space.items() if key[:2] != "__"}
    return recipes.from_namespace(own), CELLS[kind], space


def written(name: str, layout: str, **options) -> tuple[str, recipes.Recipe, TrainOptions]:
    """A script, and what it was made of."""
    return _written(name, layout, tuple(options.items()))


@functools.cache
def _written(name: str, layout: str, given: tuple) -> tuple[str, recipes.Recipe, TrainOptions]:
    recipe, cell, space = made(name)
    options = dict(given)
    chosen = TrainOptions(steps=STEPS, **options)
    recipe = recipe.changed(batch=chosen.batch)
    blueprint = Blueprint(Plan(recipe, chosen), recipe.model(), torch.device("cpu"))
    about = {"run": "digits-1", "step": 7, "steps": STEPS, "file": "script.py"}
    text = script(blueprint, parse_layout(layout), about, cell=cell, namespace=space)
    return text, recipe, chosen


def losses_in(printed: str) -> list[float]:
    found = re.findall(r"^step (\d+) loss (\S+)$", printed, re.M)
    assert [int(step) for step, _ in found] == list(range(1, len(found) + 1))
    return [float(loss) for _, loss in found]


def _runs(rank: int, size: int, paths: list[str]) -> list[str]:
    """What each script prints on this rank, run as torchrun would but for the store."""
    world, join = dist.distributed_c10d._get_default_store(), dist.init_process_group
    dist.destroy_process_group()
    printed = []
    for path in paths:

        def joined(path: str = path) -> None:
            join("gloo", store=dist.FileStore(f"{path}.store", size), rank=rank, world_size=size)

        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", joined)
            try:
                runpy.run_path(path, run_name="__main__")
            except Exception:  # noqa: BLE001 - shown beside what was expected
                out.write(traceback.format_exc())
        printed.append(out.getvalue())
        if dist.is_initialized():
            dist.destroy_process_group()
    join("gloo", store=dist.PrefixStore("end", world), rank=rank, world_size=size)
    return printed


def expected(recipe: recipes.Recipe, options: TrainOptions) -> list[float]:
    """The losses of one process with a loop written out."""
    if options.precision == "bf16":
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        build, loss = recipe.model, recipe.loss

        def model():
            module = build()
            module.forward = cast(module.forward)
            return module

        recipe = replace(recipe, model=model, loss=cast(loss))
    return [loss for loss, _ in plain(recipe, STEPS, options)]


@pytest.mark.parametrize("size", CASES)
def test_scripts_give_the_losses_of_one_plain_process(size: int, tmp_path: Path):
    paths, wanted = [], []
    for place, (name, layout, options) in enumerate(CASES[size]):
        text, recipe, chosen = written(name, layout, **options)
        paths.append(str(tmp_path / f"script{place}.py"))
        Path(paths[-1]).write_text(text)
        wanted.append(expected(recipe, chosen))
    printed = ranks(size, _runs, size, paths, timeout_s=120)
    for place, case in enumerate(CASES[size]):
        whole = "".join(rank[place] for rank in printed)
        assert losses_in(whole) == pytest.approx(wanted[place], rel=1e-5), (case, whole)


def test_a_script_runs_under_torchrun(tmp_path: Path):
    text, recipe, options = written("digits mlp", "pp2, 1f1b x4")
    (tmp_path / "script.py").write_text(text)
    command = re.search(r"^    torchrun (.*)$", text, re.M)
    assert command
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split()],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == pytest.approx(expected(recipe, options), rel=1e-5)


def test_scripts_have_no_unused_import_and_no_undefined_name(tmp_path: Path):
    for place, (_, (name, layout, options)) in enumerate(ALL):
        text = written(name, layout, **options)[0]
        assert "workbench" not in re.sub(r"^# .*|%dist_export", "", text, flags=re.M)
        (tmp_path / f"script{place}.py").write_text(text)
    done = subprocess.run(
        [BIN / "ruff", "check", "--isolated", "--select", "F,E,I", "--line-length", "110", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", recipes.names())
def test_every_built_in_recipe_can_be_written(name: str):
    assert "def train():" in written(f"{name} {recipes.builtin(name).size}".strip(), "dp2")[0]


def test_a_script_has_what_is_used_and_nothing_else():
    text = written("digits mlp", "dp2")[0]
    for word in ("AUTOCAST", "CLIP", "ACCUMULATE", "mesh", "Stage", "pipelining", "fully_shard"):
        assert word not in text
    assert len(text[text.index("def train():") :].splitlines()) < 36
    assert "What differs" not in text
    assert "at step 1, and gives the losses of that run." in " ".join(text.split())
    dropping = GPT.replace("F.gelu(", "F.dropout(")
    assert "What differs: random numbers" in of_text(dropping, "dp2")
    assert "torch.manual_seed(SEED + 1 + rank)" in of_text(dropping, "dp2")


@pytest.mark.parametrize(
    ("layout", "options", "says"),
    [
        ("dp2", {}, "come from the whole batch here, so the losses are those of the run only "
                    "up to its first step with microbatches."),
        ("pp2, gpipe x2", {}, "come from each of 2 microbatches here, so the losses are those of "
                              "the run only up to its first step with other than 2 microbatches."),
        ("dp1", {"accumulate": 3}, "come from each of 3 microbatches here"),
    ],
)  # fmt: skip
def test_the_header_does_not_promise_what_batchnorm_may_break(layout, options, says):
    text = " ".join(written("digits cnn", layout, **options)[0].partition("import")[0].split())
    named = "What differs: statistics of BatchNorm2d 2, BatchNorm2d 5, BatchNorm2d 9 "
    assert named + says in text
    assert "at step 1. What" in text


@pytest.mark.parametrize(
    ("note", "says"),
    [
        ("loss_note", "the loss depends on how a batch is split"),
        ("state_note", "the forward keeps"),
    ],
)
def test_the_header_names_what_the_run_was_noted_for(note, says):
    recipe, cell, space = made("gpt")
    blueprint = Blueprint(Plan(recipe, TrainOptions()), recipe.model(), torch.device("cpu"))
    setattr(blueprint, note, "Something.")
    about = {"run": "cell-1", "step": 0, "steps": 1, "file": "script.py"}
    text = script(blueprint, parse_layout("dp1"), about, cell=cell, namespace=space)
    assert f"What differs: {says}" in text
    assert "gives the losses" not in text


def of_text(text: str, layout: str, others: str = "", **options) -> str:
    """A script of a cell, executed after others."""
    space: dict = {"__name__": "__main__", "torch": torch}
    exec(others, space)
    before = set(space)
    exec(compile(text, "<cell 1>", "exec"), space)
    recipe = recipes.from_namespace({k: v for k, v in space.items() if k not in before})
    plan = Plan(recipe, TrainOptions(steps=STEPS, **options))
    blueprint = Blueprint(plan, recipe.model(), torch.device("cpu"))
    about = {"run": "cell-1", "step": 0, "steps": STEPS, "file": "script.py"}
    return script(blueprint, parse_layout(layout), about, cell=text, namespace=space)


SHORT = """
def model():
    return torch.nn.Linear(WIDTH, root(4))

def data():
    return torch.rand(9, WIDTH), torch.rand(9, 2)

loss = F.mse_loss
"""


def test_what_a_cell_takes_from_others_is_written_down_where_it_can_be():
    others = "from math import isqrt as root\nimport torch.nn.functional as F\nWIDTH = 3"
    text = of_text(SHORT, "dp1", others)
    assert "from math import isqrt as root\n" in text
    assert "import torch\nimport torch.nn.functional as F\n" in text
    assert "\nWIDTH = 3  # from another cell\n" in text


def test_what_other_cells_define_is_refused_by_name():
    others = "import torch.nn.functional as F\nWIDTH = 3\ndef root(n): return 2"
    with pytest.raises(RecipeError, match="uses root, which other cells define"):
        of_text(SHORT, "dp1", others)


def test_a_line_of_ipython_is_refused():
    recipe, _, space = made("gpt")
    blueprint = Blueprint(Plan(recipe, TrainOptions()), recipe.model(), torch.device("cpu"))
    about = {"run": "cell-1", "step": 0, "steps": 1, "file": "script.py"}
    with pytest.raises(RecipeError, match="Line 2 of the recipe's cell is no plain Python"):
        script(blueprint, parse_layout("dp1"), about, cell="a = 1\n!ls", namespace=space)


@pytest.mark.parametrize(
    ("text", "layout", "options", "error", "says"),
    [
        (GPT, "pp2, gpipe x2", {"batch": 7}, LayoutError, "batch=7 does not make 2 microbatches"),
        (
            GPT.replace("SGD(params, ", "SGD([{'params': list(params)[:3]}], "),
            "pp2",
            {},
            RecipeError,
            "groups parameters by their place",
        ),
        (FROZEN, "pp4", {}, RecipeError, "Rank 0 of the pipeline has nothing to train"),
        (GPT + "\ndist = 3\n", "dp2", {}, RecipeError, "something else 'dist'"),
    ],
    ids=["uneven pipeline", "groups by place", "nothing to train", "a name that is taken"],
)
def test_what_no_script_can_say_is_one_sentence(text, layout, options, error, says):
    changed = text.replace("= 16, 3, 16, 24", f"= {options.get('batch', 16)}, 3, 16, 24")
    with pytest.raises(error, match=says) as raised:
        of_text(changed, layout)
    assert "\n" not in str(raised.value)
