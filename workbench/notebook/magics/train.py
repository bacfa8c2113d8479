"""%dist_train and %%dist_train: begin a training."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current
from workbench.driver.session import in_kernel
from workbench.errors import RunError
from workbench.notebook import show
from workbench.notebook.line import from_line, layout_arguments, number, whole, whole_or_time, word
from workbench.notebook.magics import Commands
from workbench.spec.options import PRECISIONS, TrainOptions
from workbench.spec.policies import ON_LOSS, ON_NAN, ON_STALL
from workbench.spec.strategy import STRATEGIES

# Options that are called otherwise in Python.
NAMES = {"dir": "directory"}
OWN = ("recipe", "wait", "help", "silent")


@magics_class
class TrainMagics(Commands):
    """Begin a training."""

    @magic_arguments()
    @argument(
        "recipe",
        nargs="?",
        type=word,
        help="a built-in recipe; below %%dist_train the class to take",
    )
    @argument(
        "-s",
        "--strategy",
        type=word,
        help=f"{', '.join(STRATEGIES)} (data), or a layout such as 'pp2 dp2'",
    )
    @layout_arguments
    @argument("--steps", type=whole, help=f"optimizer steps ({TrainOptions.steps})")
    @argument("-b", "--batch", type=whole, help="samples in the global batch")
    @argument("--seed", type=whole, help="of parameters and data order")
    @argument("--accumulate", type=whole, metavar="N", help="microbatches in one step (1)")
    @argument("--clip", type=number, metavar="NORM", help="largest global gradient norm")
    @argument("--precision", type=word, help=f"{' or '.join(PRECISIONS)} ({PRECISIONS[0]})")
    @argument(
        "--bf16",
        dest="precision",
        action="store_const",
        const="bf16",
        help="same as --precision bf16",
    )
    @argument(
        "--recompute",
        action="store_true",
        default=None,
        help="activations again in the backward pass, instead of kept",
    )
    @argument(
        "--on-nan", type=word, help=f"{' or '.join(ON_NAN)}: a loss or gradient not finite (stop)"
    )
    @argument("--size", type=word, help="for recipes that have sizes, e.g. small")
    @argument(
        "--save-every",
        type=whole_or_time,
        metavar="N",
        help="save by itself every N steps, or each 30s, 5min",
    )
    @argument("--keep", type=whole, metavar="N", help="of those keep the last N (all)")
    @argument("--keep-every", type=whole, metavar="M", help="and those of each M-th step")
    @argument(
        "--replicate-state",
        type=whole,
        metavar="K",
        help="every K steps copies of what a rank alone holds, in another's memory",
    )
    @argument(
        "--on-loss",
        type=word,
        help=f"when a rank is lost and no spare is there: {', '.join(ON_LOSS)} (replace)",
    )
    @argument(
        "--elastic",
        dest="on_loss",
        action="store_const",
        const="shrink",
        help="same as --on-loss shrink",
    )
    @argument("--dir", type=word, help="where the run's folder is made (runs)")
    @argument(
        "--restore",
        type=word,
        metavar="CHECKPOINT",
        help="begin from a checkpoint: RUN/NAME, last, path",
    )
    @argument(
        "--on-stall",
        type=word,
        metavar="WHAT",
        help=f"when a rank stands still: {', '.join(ON_STALL)} (wait)",
    )
    @argument("--tensorboard", type=word, metavar="DIR", help="event files for TensorBoard, too")
    @argument("--wait", action="store_true", help="until it is finished; an interrupt pauses it")
    @line_cell_magic
    @from_line
    def dist_train(self, options: Any, cell: str | None = None) -> Any:
        """Begin a training and show its panel; the cell returns while it trains.

        Example::

            %dist_train digits --strategy pipeline --microbatches 8 --steps 500

        The same for the recipe that the cell defines: model(), data(), loss(output, target).

        Example::

            %%dist_train --steps 300
            ...

        Returns the run. An interrupt of --wait pauses the training after the step under way.
        In Python: ``run = engines.train("digits", steps=500)``, ``engines.train(cell=text)``
        """
        how: dict[str, Any] = {
            NAMES.get(name) or name: value
            for name, value in vars(options).items()
            if value is not None and name not in OWN
        }
        if cell is not None:
            # So that line numbers are those of the editor, which counts the line of the magic.
            how["cell"] = f"\n{cell}"
        run = current.engines().train(options.recipe, **how)
        self.shown.display(run, silent=options.silent)
        if options.wait and run.wait()["state"] in ("failed", "gone"):
            raise RunError(run.message)
        if options.wait and not in_kernel():
            self.shown.say(run, show.line(run), silent=options.silent)
        return run
