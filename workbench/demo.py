"""A whole training in the terminal: start ranks, train, save, restore, stop, and a table.

Only the Python API, so it is an example of it, too: `python -m workbench.demo -n 4`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import workbench
from workbench.errors import WorkbenchError


class Phase:
    """One line on the screen: the phase's name at once, what came of it at its end."""

    def __init__(self) -> None:
        self.text = ""

    def says(self, text: str) -> None:
        """What stands between the name and the time."""
        self.text = text


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Print the phase's line; `restore   step-300, back at step 300    0.05 s`."""
    print(f"{name:<9}", end="", flush=True)
    began_s = time.perf_counter()
    line = Phase()
    try:
        yield line
    except BaseException:
        print()
        raise
    print(f"{line.text:<58}{time.perf_counter() - began_s:8.2f} s", flush=True)


def table(totals: dict, accuracy: float | None, num_ranks: int) -> str:
    """The results, one a line; a dash for what is not known."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = {
        "ranks": str(num_ranks),
        "loss, first step": shown(totals["loss_first"], ".4f"),
        "loss, last step": shown(totals["loss_last"], ".4f"),
        "test accuracy": shown(accuracy, ".1%"),
        "samples/s": shown(totals["rate"], ",.0f"),
        "communication": shown(totals["comm"], ".1%"),
        "saves": str(totals["saves"]),
    }
    return "\n".join(f"{name:<18}{value:>10}" for name, value in rows.items())


def demo(num_ranks: int, num_steps: int) -> str:
    """Run the phases, one line each -> the table. Raises WorkbenchError."""
    with phase("start") as line:
        engines = workbench.start(n=num_ranks)
        ranks = engines.status()
        line.says(
            f"{engines.num_ranks} ranks on {ranks[0]['device']}, "
            f"threads each: {ranks[0]['threads']}; all-reduce done"
        )
    with engines:
        with phase("train") as line:
            run = engines.train("digits", strategy="data", steps=num_steps)
            seen = run.wait()
            if seen["state"] != "finished":
                raise WorkbenchError(seen["message"] or f"The run is {seen['state']}.")
            line.says(f"digits, {seen['layout']}: {seen['step']:,} steps")
        with phase("save") as line:
            name = run.save()
            line.says(os.path.relpath(run.directory / "checkpoints" / name))
        with phase("restore") as line:
            line.says(f"{name}, back at step {run.restore(name):,}")
        seen, totals = run.snapshot(), run.totals()
        with phase("stop") as line:
            engines.stop()
            line.says("ranks, sockets and logs are gone")
    return table(totals, seen["metrics"].get("accuracy"), num_ranks)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line -> exit code; an error is one sentence."""
    parser = argparse.ArgumentParser(prog="python -m workbench.demo", description=__doc__)
    parser.add_argument("-n", "--num-ranks", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--steps", type=int, default=300, help="steps to train (default 300)")
    options = parser.parse_args(arguments)
    try:
        print(f"\n{demo(options.num_ranks, options.steps)}")
    except WorkbenchError as error:
        print("\n".join([str(error), *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the ranks were stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
