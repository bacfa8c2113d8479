"""%dist_pause, %dist_resume, %dist_step, %dist_save, %dist_restore, ...: the training there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from workbench.driver import current, runs
from workbench.driver.checkpoints import LAST
from workbench.driver.revive import revive
from workbench.driver.saving import hf_folder
from workbench.driver.session import in_kernel
from workbench.driver.training import DIRECTORY
from workbench.errors import InputError
from workbench.notebook import show
from workbench.notebook.line import from_line, layout_arguments, whole, word
from workbench.notebook.magics import Commands
from workbench.spec import policies
from workbench.spec.policies import ON_LOSS, ON_STALL
from workbench.spec.strategy import LAYOUT_OPTIONS, STRATEGIES


@magics_class
class RunMagics(Commands):
    """Commands to the training; each acts between two steps."""

    def _told(self, run: Any, options: Any) -> Any:
        return self.shown.say(run, show.line(run), silent=options.silent)

    @magic_arguments()
    @line_magic
    @from_line
    def dist_pause(self, options: Any) -> Any:
        """Pause the training after the step under way.

        Example::

            %dist_pause

        Returns the run. In Python: ``run.pause()``
        """
        run = current.run()
        run.pause()
        return self._told(run, options)

    @magic_arguments()
    @argument(
        "--steps",
        type=whole,
        metavar="N",
        help="so many further; default to the goal, or 100 past it",
    )
    @line_magic
    @from_line
    def dist_resume(self, options: Any) -> Any:
        """Go on with the training.

        Example::

            %dist_resume --steps 200

        Returns the run. In Python: ``run.resume(steps=200)``
        """
        run = current.run()
        run.resume(options.steps)
        return self._told(run, options)

    @magic_arguments()
    @argument("steps", nargs="?", type=whole, default=1, metavar="N", help="steps to take (1)")
    @line_magic
    @from_line
    def dist_step(self, options: Any) -> Any:
        """Take exactly so many steps, then pause.

        Example::

            %dist_step 5

        Returns the run. In Python: ``run.step(5)``
        """
        run = current.run()
        run.step(options.steps)
        return self._told(run, options)

    @magic_arguments()
    @argument("name", nargs="?", type=word, help="of the checkpoint (step-<n>)")
    @argument("--export", type=word, metavar="hf", help="also as from_pretrained reads it")
    @line_magic
    @from_line
    def dist_save(self, options: Any) -> Any:
        """Write a checkpoint, whole or not at all; the training goes on.

        Example::

            %dist_save before-lunch

        Returns the name. In Python: ``run.save("before-lunch")``,
        ``run.save("before-lunch", export="hf")``
        """
        run = current.run()
        name = run.save(options.name, export=options.export)
        entry = next(entry for entry in run.checkpoints() if entry["name"] == name)
        exported = hf_folder(run.directory, name) if options.export else None
        return self.shown.display(show.saved(entry, exported), silent=options.silent)

    @magic_arguments()
    @argument(
        "strategy",
        nargs="*",
        type=word,
        help=f"{', '.join(STRATEGIES)}, or a whole layout: pp2 dp2, 1f1b x8",
    )
    @layout_arguments
    @line_magic
    @from_line
    def dist_switch(self, options: Any) -> Any:
        """Go on under another strategy from the same step; the loss curve goes on with it.

        Example::

            %dist_switch pipeline --microbatches 8

        Returns the run. In Python: ``run.switch("pipeline", microbatches=8)``,
        ``run.switch("pp2 dp2, 1f1b x8")``
        """
        run = current.run()
        how = {name: getattr(options, name) for name in ("ranks", *LAYOUT_OPTIONS)}
        before = run.events
        run.switch(" ".join(options.strategy) or None, **how)
        return self.shown.say(run, show.switched(run, before), silent=options.silent)

    @magic_arguments()
    @argument(
        "checkpoint",
        nargs="?",
        type=word,
        default=LAST,
        help="name, RUN/NAME, step, path, or last (last)",
    )
    @line_magic
    @from_line
    def dist_restore(self, options: Any) -> Any:
        """Go back to a checkpoint, however many ranks wrote it.

        Example::

            %dist_restore step-120

        Returns the run. In Python: ``run.restore("step-120")``
        """
        run = current.run()
        run.restore(options.checkpoint)
        return self._told(run, options)

    @magic_arguments()
    @argument("how", nargs="?", type=word, help="replace or shrink (replace)")
    @line_magic
    @from_line
    def dist_recover(self, options: Any) -> Any:
        """Bring back ranks that are gone, and go on with the training.

        Example::

            %dist_recover shrink

        replace: spares or fresh processes take their places. shrink: go on with those that are
        left, where the strategy is data. The state comes from the other ranks, or from the last
        checkpoint. Without a training the ranks alone come back.
        Returns the run. In Python: ``run.recover("shrink")``
        """
        engines = current.engines()
        if engines.run is None or engines.run.state == "gone":
            text = "\n".join(revive(engines).values()) or "No rank is gone."
            return self.shown.say(engines, text, silent=options.silent)
        if not engines.roster.gone() and engines.num_ranks == len(engines.roster.places):
            return self.shown.say(engines.run, "No rank is gone.", silent=options.silent)
        engines.run.recover(options.how)
        return self._told(engines.run, options)

    @magic_arguments()
    @argument("--on-loss", type=word, help=f"one of {', '.join(ON_LOSS)}")
    @argument("--on-stall", type=word, help=f"one of {', '.join(ON_STALL)}")
    @line_magic
    @from_line
    def dist_policy(self, options: Any) -> Any:
        """What the training does by itself when a rank is lost without a spare, or stands still.

        Example::

            %dist_policy --on-loss wait --on-stall interrupt

        Without a training: what the next ones do unless they are told otherwise.
        Returns the run, the engines where there is none.
        In Python: ``run.policy("wait", on_stall="interrupt")``, ``engines.policies``
        """
        engines = current.engines()
        given = {"on_loss": options.on_loss, "on_stall": options.on_stall}
        run = engines.run
        if run is None or run.state == "gone":
            policies.check_all(**given)
            engines.policies |= {name: value for name, value in given.items() if value is not None}
            text = f"The next training: {policies.said(**engines.policies)}"
            return self.shown.say(engines, text, silent=options.silent)
        if any(value is not None for value in given.values()):
            run.policy(**given)
        text = f"{run.name}: {policies.said(run.outages.policy, run.watch.policy)}"
        return self.shown.say(run, text, silent=options.silent)

    @magic_arguments()
    @argument("--dir", type=word, help="folder of runs (that of this run, else runs)")
    @line_magic
    @from_line
    def dist_checkpoints(self, options: Any) -> Any:
        """The checkpoints of this run and of the other runs in its folder, the newest last.

        Example::

            %dist_checkpoints --dir runs

        Returns a list of dicts, shown as a table.
        In Python: ``run.checkpoints()``, ``workbench.driver.runs.list_in("runs")``
        """
        found = current.all_engines()
        run = found[-1].run if found else None
        root = Path(options.dir or (run.directory.parent if run else DIRECTORY)).expanduser()
        if options.dir and not root.is_dir():
            raise InputError(f"--dir {options.dir}: there is no such folder. Name one with runs.")
        own = run.name if run and root.resolve() == run.directory.parent else None
        table = show.checkpoints(runs.list_in(root), str(root), own)
        return self.shown.display(table, silent=options.silent)

    @magic_arguments()
    @argument("--big", action="store_true", help="for a projector")
    @argument("--lang", type=word, default="en", help="language of the panel (en)")
    @line_magic
    @from_line
    def dist_panel(self, options: Any) -> Any:
        """Show the panel again; there may be as many as you like.

        Example::

            %dist_panel --big

        Returns the panel; in a terminal the run, as text.
        In Python: ``workbench.notebook.panel.Panel(run, big=True)``
        """
        from workbench.notebook.panel import Panel

        run = current.run()
        if not in_kernel():
            return self.shown.display(run, silent=options.silent)
        panel = Panel(run, big=options.big, lang=options.lang)
        return self.shown.display(panel, silent=options.silent)
