"""Asked: the commands of a run as methods that wait for them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import RunError

if TYPE_CHECKING:
    from workbench.driver.engines import Engines


class Asked:
    """The part of a Run that asks its thread for something and waits for the answer."""

    engines: Engines

    def ask(self, verb: str, **how: Any) -> Future:
        """Queue a command; the future holds its result."""
        raise NotImplementedError

    def _result(self, verb: str, **how: Any) -> Any:
        """What a command gives; an interrupt ends the waiting, not the command."""
        try:
            return self.ask(verb, **how).result()
        except KeyboardInterrupt:
            raise RunError(
                f"Interrupted while waiting for {verb}, which goes on. %dist_status shows the rest."
            ) from None

    def pause(self) -> int:
        """Stop between two steps -> the step; the state stays on the ranks."""
        return self._result("pause")

    def resume(self, steps: int | None = None) -> int:
        """Go on, to the goal or `steps` further -> the step it goes on from."""
        return self._result("resume", steps=steps)

    def step(self, n: int = 1) -> int:
        """Take exactly n steps, then pause -> the step reached; an interrupt ends it sooner."""
        asked = self.ask("step", n=n)
        try:
            return asked.result()
        except KeyboardInterrupt:
            return self._give_way()

    def _give_way(self) -> int:
        """What an interrupt means: pause after the step under way; the second breaks it off."""
        asked = self.ask("pause")
        try:
            step = asked.result()
        except KeyboardInterrupt:
            self.engines.interrupt()
            raise RunError(
                "Interrupted twice: the step under way is broken off. %dist_status shows the rest."
            ) from None
        raise RunError(f"Interrupted: paused after step {step:,}. %dist_resume goes on.")

    def stop(self) -> int:
        """End the training after the step under way, keeping its state -> the step."""
        return self._result("stop")

    def save(self, name: str | None = None, *, export: str | None = None) -> str:
        """Write a checkpoint, beside the training -> its name, `step-<n>` unless given.

        export: "hf" to write runs/RUN/hf/NAME as well, for Hugging Face's from_pretrained.
        """
        return self._result("save", name=name, export=export)

    def restore(self, what: str | int = "last") -> int:
        """Go back to a checkpoint (name, step, path or 'last') -> its step."""
        return self._result("restore", what=what)

    def switch(
        self, strategy: str | None = None, *, ranks: int | None = None, **options: Any
    ) -> int:
        """Go on under another strategy or layout, from the same step -> that step.

        strategy: a name with its options (spec/strategy.py), or a text such as `pp2 dp2, 1f1b x8`.
        """
        return self._result("switch", strategy=strategy, ranks=ranks, **options)

    def export(self, path: str | Path, *, force: bool = False) -> Path:
        """Write recipe and layout as a plain torchrun script -> its path; force: overwrite."""
        return self._result("export", path=path, force=force)

    def profile(self, path: str | Path, *, force: bool = False) -> Path:
        """One step under torch.profiler on all ranks, and ours beside it, for Perfetto -> path."""
        return self._result("profile", path=path, force=force)

    def recover(self, how: str | None = None) -> int:
        """Bring ranks that are gone back, by `replace` or `shrink` -> the step it stands at."""
        return self._result("recover", how=how)

    def policy(self, on_loss: str | None = None, *, on_stall: str | None = None) -> str:
        """What happens when a rank is lost and no spare is there, and when one stands still.

        Names of spec.policies.ON_LOSS and ON_STALL; None leaves it -> the former.
        """
        return self._result("policy", on_loss=on_loss, on_stall=on_stall)

    def wake(self) -> None:
        """Let ranks that a fault has stopped go on."""
        raise NotImplementedError

    def inject(
        self, kind: str, *, rank: int | None = None, at_step: int | None = None, **how: Any
    ) -> dict[str, Any]:
        """Have a rank go wrong, once, at a step to come; how: the rest of spec.fault.Fault."""
        return self._result("inject", kind=kind, rank=rank, at_step=at_step, **how)

    def clear_faults(self) -> int:
        """Forget the faults that wait, end those that last -> how many that were."""
        self.wake()
        return self._result("clear_faults")

    def evaluate(self) -> dict[str, float]:
        """The recipe's metrics now."""
        return self._result("evaluate")
