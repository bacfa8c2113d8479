"""A run that trains nothing: snapshots as the driver makes them, for what only draws."""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import Future
from typing import Any

from tests.browser.panel_step import by_rank, sample
from workbench.errors import RunError
from workbench.spec.choices import choices
from workbench.spec.events import happened
from workbench.spec.layout import Layout
from workbench.spec.limits import Limits
from workbench.spec.strategy import layout_for, strategy_of

ALWAYS = [
    "step", "save", "restore", "switch", "recover", "policy", "inject", "clear_faults",
]  # fmt: skip
ALLOWED = {
    "running": ["pause", "stop", *ALWAYS],
    "paused": ["resume", "stop", *ALWAYS],
    "finished": ["resume", *ALWAYS],
    "stopped": ["resume", *ALWAYS],
    "waiting": ["recover", "policy", "stop"],
}
# Seconds from the notice to the end of each phase, as driver/outages.py marks them.
PHASES_S = {"free": 0.02, "places filled": 0.025, "met": 0.11, "state": 0.16, "first new step": 0.2}
CURVE_POINTS = 600
UNITS = ["token", "position", *(f"blocks.{i}" for i in range(6)), "norm", "head"]
LIMITS = Limits(batch=64, units=UNITS, tensor={"heads": 4, "vocabulary": 256})
# Of the speed with replicated data.
SPEED = {"data": 1.0, "model": 0.3, "pipeline": 0.75, "hybrid": 0.85, "none": 0.4}


def stages(layout: Layout) -> list[dict[str, Any]]:
    """The parts of the model cut into equal runs; [] without a pipeline."""
    count = layout.num_stages
    ends = [round(len(UNITS) * n / count) for n in range(count + 1)]
    cut = [UNITS[first:end] for first, end in itertools.pairwise(ends)]
    parts = [{"units": units, "share": len(units) / len(UNITS)} for units in cut]
    return parts if layout.pp > 1 else []


def places(layout: Layout, ranks: int, batch: int) -> list[dict[str, Any]]:
    """Where each rank lies, what it holds and takes."""
    found = []
    shares = [stage["share"] for stage in stages(layout)] or [1.0]
    for rank in range(ranks):
        if rank >= layout.world_size:
            found.append({"rank": rank, "idle": True, "held": 0.0, "stages": [], "samples": []})
            continue
        where, share = layout.coordinate(rank), layout.share(rank)
        held = sum(shares[stage] for stage in layout.stages(rank)) / layout.tp / layout.dp_shard
        ends = [batch * n // layout.dp for n in (share, share + 1)]
        found.append({
            "rank": rank, "pp": where["pp"], "dp": share, "tp": where["tp"], "idle": False,
            "stages": layout.stages(rank), "samples": ends, "held": held,
        })  # fmt: skip
    return found


class StandIn:
    """Answers as a run of `goal` steps; `advance` is the training."""

    def __init__(
        self, *, ranks: int = 4, goal: int = 500, step: int = 0, limits: Limits = LIMITS
    ) -> None:
        self.limits = limits
        self.version = 0
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self._changed = threading.Lock()
        self._end = threading.Event()
        self._wave: dict[str, list] = {"step": [], "loss": [], "rate": []}
        self._state: dict[str, Any] = {
            "name": "digits-3", "recipe": "digits", "state": "paused", "message": "", "step": 0,
            "goal": goal, "loss": None, "rate": None, "unit": "samples/s", "comm": None,
            "ranks": ranks, "alive": ranks, "precision": "fp32", "batch": limits.batch,
            "lossy": "", "by_rank": [], "marks": [], "metrics": {}, "metrics_step": None,
            "checkpoints": [], "events": [], "engines": [], "pending": "", "idle": None,
            "sample": None, "memory": [], "derived": {}, "branches": [], "saving": None,
            "faults": {
                "faults": 0, "lost_steps": 0, "downtime_s": 0.0, "goodput": None, "outages": [],
                "policy": "replace", "on_stall": "wait", "spares": 0, "smaller": "",
                "under_way": [],
            },
        }  # fmt: skip
        self.slow_ms: dict[int, float] = {}
        self.lay_out(layout_for("data", ranks))
        if step:
            self.advance(step)

    def lay_out(self, layout: Layout) -> None:
        """Be under a layout from now on."""
        ranks = self._state["ranks"]
        self._layout = layout
        self.change(
            strategy=strategy_of(layout),
            layout=str(layout),
            choices=choices(self.limits, ranks, layout),
            stages=stages(layout),
            places=places(layout, ranks, self.limits.batch),
        )

    def advance(self, steps: int = 1) -> None:
        """Go on by some steps."""
        with self._changed:
            now = self._state
            for step in range(now["step"] + 1, now["step"] + steps + 1):
                slow = 0.62 if "fsdp" in now["layout"] else SPEED[now["strategy"]]
                loss = 0.08 + 2.25 * math.exp(-step / 110) * (1 + 0.07 * math.sin(step * 1.7))
                rate = slow * (2616 + 70 * math.sin(step * 0.9) + 50 * math.cos(step * 2.3))
                now.update(step=step, loss=loss, rate=rate)
                for key, value in (("step", step), ("loss", loss), ("rate", rate)):
                    self._wave[key].append(value)
            self._measure()
            if now["step"] >= now["goal"]:
                now.update(state="finished", metrics={"accuracy": 0.9722}, metrics_step=now["step"])
            self.version += 1

    def change(self, **values: Any) -> None:
        """Set parts of the snapshot."""
        with self._changed:
            self._state.update(values)
            self.version += 1

    def tell(self, kind: str, text: str) -> None:
        """Add an event."""
        self.change(
            events=[*self._state["events"], {"time_s": time.time(), "kind": kind, "text": text}]
        )

    def snapshot(self) -> dict[str, Any]:
        """As the driver's run gives it."""
        with self._changed:
            every = -(-len(self._wave["step"]) // CURVE_POINTS) or 1
            curve = {key: values[::every] for key, values in self._wave.items()}
            return {**self._state, "curve": curve, "allowed": ALLOWED.get(self._state["state"], [])}

    def lose(self, rank: int, *, filled: str = "a spare one is rank {}", lost: int = 0) -> None:
        """Lose a rank; filled: who takes its place at once, "": nobody, it waits."""
        step, faults = self._state["step"], self._state["faults"]
        marks = [list(one) for one in PHASES_S.items()] if filled else [["free", 0.02]]
        outage = {
            "why": f"rank {rank}: its process was killed by SIGKILL", "step": step,
            "time_s": time.time(), "marks": marks, "lost_steps": lost,
            "source": "the other ranks" if filled else "", "filled": filled.format(rank),
            "is_over": bool(filled),
        }  # fmt: skip
        outages = [*faults["outages"], outage]
        downtime_s = sum(one["marks"][-1][1] for one in outages)
        told = {"faults": len(outages), "downtime_s": downtime_s, "goodput": 0.93}
        told["lost_steps"] = sum(one["lost_steps"] for one in outages)
        mark = {"step": step, "label": "lost", "kind": "fault"}
        self.change(
            faults={**faults, **told, "outages": outages},
            marks=[*self._state["marks"], mark],
        )
        self.happened("lost", ranks=f"Rank {rank}", why=outage["why"], step=step)
        if not filled:
            message = f"Rank {rank} gone. %dist_recover brings a fresh process."
            left = [
                {**place, "is_gone": True, "held": 0.0} if place["rank"] == rank else place
                for place in self._state["places"]
            ]
            alive = self._state["alive"] - 1
            self.change(state="waiting", alive=alive, message=message, places=left)

    def happened(self, what: str, **values: Any) -> None:
        """Add one of spec.events."""
        self.change(events=[*self._state["events"], happened(what, values)])

    def _recover(self, how: str = "replace") -> None:
        faults = self._state["faults"]
        last = {**faults["outages"][-1], "is_over": True, "source": "the other ranks"}
        last["filled"] = f"a fresh one is rank 1, {how}"
        marks = {"free": 20.02, **{key: 20 + at_s for key, at_s in PHASES_S.items()}}
        last["marks"] = [["free", 0.02], *map(list, marks.items())]
        self.change(
            faults={**faults, "outages": [*faults["outages"][:-1], last]},
            state="running", alive=self._state["ranks"], message="",
            places=places(self._layout, self._state["ranks"], self.limits.batch),
        )  # fmt: skip

    def _inject(self, kind: str, rank: int, for_s: float | None = None) -> None:
        told = f"{kind} of rank {rank} in forward of step {self._state['step'] + 1}"
        self.change(faults={**self._state["faults"], "under_way": [told]})

    def _clear_faults(self) -> None:
        self.change(faults={**self._state["faults"], "under_way": []})

    def _policy(self, on_loss: str | None = None, on_stall: str | None = None) -> None:
        now = self._state["faults"]
        chosen = {"policy": on_loss or now["policy"], "on_stall": on_stall or now["on_stall"]}
        self.change(faults={**now, **chosen})

    def ask(self, verb: str, **kwargs: Any) -> Future:
        """Do what is asked at once."""
        self.commands.append((verb, kwargs))
        future: Future = Future()
        if verb not in self.snapshot()["allowed"]:
            future.set_exception(
                RunError(f"{verb} does not fit a run that is {self._state['state']}.")
            )
            return future
        getattr(self, f"_{verb}")(**kwargs)
        future.set_result(None)
        return future

    def train(self, period_s: float = 0.05) -> threading.Thread:
        """Advance in a thread while running, until `end` -> the thread."""

        def work() -> None:
            while not self._end.wait(period_s):
                if self._state["state"] == "running":
                    self.advance(1)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """End the thread of `train`."""
        self._end.set()

    def _pause(self) -> None:
        self.change(state="paused")

    def _resume(self) -> None:
        self.change(state="running")

    def _stop(self) -> None:
        self.change(state="stopped")

    def _step(self) -> None:
        self.change(state="paused")
        self.advance(1)

    def _save(self) -> None:
        step = self._state["step"]
        one = {
            "name": f"step-{step}",
            "step": step,
            "time_s": time.time(),
            "bytes": 123456,
            "layout": self._state["layout"],
            "stall_ms": 3.1,
            "write_ms": 41.0,
        }
        self.change(checkpoints=[*self._state["checkpoints"], one])
        self._mark("saved", "save", f"Saved step-{step}, 123 KB.")

    def _restore(self, what: str) -> None:
        one = next(one for one in self._state["checkpoints"] if one["name"] == what)
        with self._changed:
            keep = one["step"]
            branch = {key: values[keep - 1 :] for key, values in self._wave.items()}
            self._state["branches"] = [
                *self._state["branches"], {"layout": self._state["layout"], **branch},
            ]  # fmt: skip
            self._wave = {key: values[:keep] for key, values in self._wave.items()}
        self.change(step=one["step"])
        self._mark("restored", "save", f"Restored {what}.")

    def _switch(self, strategy: str, *, ranks: int | None = None, **options: Any) -> None:
        layout = layout_for(strategy, ranks or self._state["ranks"], **options)
        self.lay_out(layout)
        cost = {"took_s": 0.214, "moved_bytes": 1_234_567, "layout": str(layout)}
        text = f"{layout} from step {self._state['step']} on, in 0.21 s, 1.2 MB moved."
        self._mark(strategy, "switch", text, **cost)

    def _mark(self, label: str, kind: str, text: str, **cost: Any) -> None:
        mark = {"step": self._state["step"], "label": label, **cost}
        self.change(marks=[*self._state["marks"], mark])
        self.tell(kind, text)

    def _measure(self) -> None:
        """What the meters say of the last step; its parts, its spans and its sums are one."""
        now, layout = self._state, self._layout
        taken = sample(layout, now["ranks"], now["step"], 64e3 / now["rate"], self.slow_ms)
        rows = by_rank(taken, 61_440)
        wall_ms = sum(row["wall_ms"] for row in rows)
        idle = sum(row["idle_ms"] for row in rows) / wall_ms
        now.update(
            sample=taken,
            by_rank=rows,
            comm=sum(row["wire_ms"] for row in rows) / wall_ms,
            idle=idle,
            memory=[memory(place) for place in now["places"] if not place["idle"]],
            engines=[engine(rank, now["step"]) for rank in range(now["ranks"])],
            derived={
                "flops": 4.2e9, "mfu": 0.31, "peak_flops": 2.6e11 * now["ranks"],
                "bubble": idle if layout.pp > 1 else None,
                "bubble_formula": (layout.pp - 1) / (layout.pp - 1 + layout.microbatches)
                if layout.pp > 1 else None,
            },
        )  # fmt: skip


def memory(place: dict[str, Any]) -> dict[str, Any]:
    """What a rank that holds a share of the model has in memory, in bytes."""
    held = round(place["held"] * 1_129_512)
    activations = round(2_400_000 * (0.4 + place["held"]) / (1 + place["pp"] / 4))
    return {
        "rank": place["rank"], "parameters": held, "gradients": held, "optimizer": 2 * held,
        "activations": activations, "resident": 4 * held + activations + 310_000_000,
    }  # fmt: skip


def engine(rank: int, step: int) -> dict[str, Any]:
    """A rank's process and its device."""
    return {
        "rank": rank, "state": "alive", "device": "cpu", "threads": 1, "host": "lectern",
        "pid": 41_200 + rank, "cpu": 0.9 + 0.09 * math.sin(rank + step), "log": "",
        "resident": 310_000_000 + 7_000_000 * (rank % 3), "gpu": None,
    }  # fmt: skip
