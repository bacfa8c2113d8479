"""Training: from what the user asked for to a Run, checked before anything on a rank changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.driver import card, rescue, runs
from workbench.driver.commands import layout_of
from workbench.driver.revive import revive
from workbench.driver.run import Run
from workbench.driver.tensorboard import EventFile
from workbench.errors import CheckpointError, InputError, RecipeError, RunError
from workbench.spec import manifest as manifests
from workbench.spec import policies
from workbench.spec.near import unknown
from workbench.spec.options import TrainOptions
from workbench.spec.registry import names_in
from workbench.spec.strategy import LAYOUT_OPTIONS

if TYPE_CHECKING:
    from workbench.driver.engines import Engines

DIRECTORY = "runs"


def recipe_names() -> list[str]:
    """Names of the built-in recipes."""
    return names_in("recipes")


def train(  # noqa: PLR0913 - keyword-only, each an option of %dist_train
    engines: Engines,
    recipe: str | None = None,
    *,
    cell: str | None = None,
    strategy: str = "data",
    ranks: int | None = None,
    restore: str | None = None,
    directory: str | Path = DIRECTORY,
    start: bool = True,
    on_loss: str | None = None,
    on_stall: str | None = None,
    tensorboard: str | Path | None = None,
    **options: Any,
) -> Run:
    """Build a training on all ranks and start it; returns at once, the Run is the handle.

    recipe: a built-in one by name, or with `cell` the class to take. cell: text that defines a
    recipe, executed on every rank. strategy: see spec/strategy.py, which also says what options it
    takes (shard, by, microbatches, schedule, dp, pp, tp). ranks: how many train, the first of
    them; the others wait. restore: a checkpoint to begin from. directory: where the
    run's own folder (journal, checkpoints) is made. on_loss: what happens when a rank is lost and
    no spare is there, on_stall: when one stands still, see spec/policies.py; None: as
    `engines.policies` has it. start: False leaves it paused. tensorboard: a folder of event
    files, where one of this run is written to. options: see TrainOptions.

    Raises InputError, LayoutError, RecipeError, RunError or CheckpointError; a training that was
    there before goes on existing unless a new one could be built.
    """
    folders = {"directory": directory} | (
        {} if tensorboard is None else {"tensorboard": tensorboard}
    )
    _check_kinds({"recipe": recipe, "cell": cell}, folders)
    policies.check_all(on_loss=on_loss, on_stall=on_stall)
    revive(engines)
    asked = {"on_loss": on_loss, "on_stall": on_stall}
    how = {key: options.pop(key) for key in list(options) if key in LAYOUT_OPTIONS}
    try:
        chosen = TrainOptions(**options)
    except TypeError:
        wrong = sorted(set(options) - set(TrainOptions.__dataclass_fields__))
        known = [*TrainOptions.__dataclass_fields__, *LAYOUT_OPTIONS]
        raise InputError(unknown("option", wrong[0], known)) from None
    layout = layout_of(strategy, ranks, how, engines.num_ranks)
    if cell is None and recipe is None:
        raise RecipeError(
            f"No recipe named. Known: {', '.join(recipe_names())}; or define one in a "
            "%%dist_train cell."
        )
    if cell is None and recipe not in recipe_names():
        raise RecipeError(unknown("recipe", str(recipe), recipe_names()))
    if engines.run is not None and engines.run.state == "running":
        run = engines.run
        raise RunError(
            f"{run.name} is training (step {run.step_now:,} of {run.goal:,}), and the ranks hold "
            "one training at a time. %dist_pause it first."
        )
    found = runs.find(directory, restore).resolve() if restore is not None else None
    if found is not None and "steps" in options:
        _check_ahead(found, chosen.steps)
    number = 0
    if cell is not None:
        # Data that the cell draws at random must be the same on all ranks.
        engines.call("reseed", chosen.seed or 0)
        number = engines.run_cell(cell).number
    folder = _make_folder(Path(directory), recipe or "cell")
    how = (recipe, cell is not None, layout.to_dict(), chosen.to_dict())
    built, file = _built(engines, how, folder, tensorboard)
    facts = built[0].pop("facts")
    about = {
        **built[0], "cell": cell, "number": number, "asked": recipe, **engines.policies,
        **{name: value for name, value in asked.items() if value is not None},
    }  # fmt: skip
    before, run = engines.run, Run(engines, about, chosen, folder, layout)
    engines.run = run
    run.event_file = file
    run.peaks = [reply["peak_flops"] for reply in built]
    run.lay_out(layout, built)
    rescue.trained_by(run, engines.roster.members, facts)
    run.begin(running=False)
    card.name_run(engines.directory, folder)
    if before is not None:
        run.tell("info", before.give_up_ranks())
    if found is not None:
        run.restore(str(found))
    if start and chosen.steps:
        run.resume()
    return run


def _check_ahead(checkpoint: Path, steps: int) -> None:
    """Raises InputError for a goal that lies behind where the training would begin."""
    step = manifests.read(checkpoint).get("step") or 0
    if 0 < steps <= step:
        raise InputError(
            f"The checkpoint is at step {step:,} and steps={steps} is the step to go to. Use "
            f"steps={step + steps} for {steps} more, or leave it out."
        )


def _built(
    engines: Engines, how: tuple, folder: Path, tensorboard: str | Path | None
) -> tuple[list[dict[str, Any]], EventFile | None]:
    """What the ranks say of the training they have built, and its event file if one is wanted.

    When it raises, nothing of either is left, and the ranks hold what they held.
    """
    file = None
    try:
        if tensorboard is not None:
            file = EventFile(Path(tensorboard) / folder.name)
        return engines.together("build", *how, str(folder)), file
    except BaseException:
        _remove(folder)
        if file is not None:
            file.discard()
        raise


def _check_kinds(texts: dict[str, Any], folders: dict[str, Any]) -> None:
    """Raises InputError for what is no text and no path."""
    for name, value in texts.items():
        if not isinstance(value, (str, type(None))):
            raise InputError(f"{name}={value!r:.40}: use text.")
    for name, value in folders.items():
        if not isinstance(value, (str, Path)) or not str(value):
            raise InputError(f"{name}={value!r:.40}: name a folder, such as 'runs'.")


def _make_folder(root: Path, name: str) -> Path:
    """A new folder `<name>-<k>` with room for journal and checkpoints."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for folder in _candidates(root, name):
            try:
                folder.mkdir(mode=0o700)  # a checkpoint may hold what nobody else may read
            except FileExistsError:
                continue
            for part in ("journal", "checkpoints"):
                (folder / part).mkdir()
            return folder.resolve()
    except OSError as error:
        raise CheckpointError(
            f"No run can be kept under {root.absolute()}: {error.strerror}. "
            "Name another folder with --dir."
        ) from None
    raise AssertionError("unreachable: the candidates do not end")


def _candidates(root: Path, name: str) -> Iterator[Path]:
    return (root / f"{name}-{number}" for number in itertools.count(1))


def _remove(folder: Path) -> None:
    for part in ("journal", "checkpoints", "."):
        (folder / part).rmdir()
