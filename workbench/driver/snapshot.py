"""What is shown of a run, as plain values that need no thread and no rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.driver import rescue
from workbench.driver.sample import bubble
from workbench.spec.strategy import strategy_of

if TYPE_CHECKING:
    from workbench.driver.run import Run

# What may be asked of a run in which state.
ALWAYS = (
    "step", "profile", "save", "restore", "switch", "export", "recover", "policy", "inject",
    "clear_faults",
)  # fmt: skip
ALLOWED = {
    "running": ("pause", *ALWAYS, "stop"),
    "paused": ("resume", *ALWAYS, "stop", "evaluate"),
    "finished": ("resume", *ALWAYS, "evaluate"),
    "stopped": ("resume", *ALWAYS, "evaluate"),
    "failed": ("resume", *ALWAYS, "stop", "evaluate"),
    # For the user to say what is to be done about ranks that are gone.
    "waiting": ("recover", "policy", "stop"),
}


def snapshot(run: Run) -> dict[str, Any]:
    """State, figures and lists of a run; numbers not yet known are None."""
    history, now = run.history, run.history.now()
    gauges = run.engines.gauges()
    rows = [{**row, **gauge} for row, gauge in zip(run.engines.status(), gauges, strict=True)]
    stopped = run.engines.stopped
    return {
        "name": run.name,
        "recipe": run.about["recipe"],
        "state": run.state,
        "message": run.message,
        "step": run.step_now,
        "goal": run.goal,
        "loss": history.last_loss(),
        **now,
        "unit": f"{run.about['unit']}/s",
        "ranks": run.engines.num_ranks,
        "alive": 0 if stopped else sum(row["state"] == "alive" for row in rows),
        "strategy": strategy_of(run.layout),
        "layout": str(run.layout),
        "stages": run.stages,
        "places": places(run),
        "choices": run.choices,
        "precision": run.options.precision,
        "batch": run.about["batch"],
        "lossy": "bf16 autocast" if run.options.precision == "bf16" else "",
        "curve": history.curve(),
        "branches": list(history.branches),
        "by_rank": history.by_rank(),
        "sample": history.samples[-1] if history.samples else None,
        "memory": [row for row in run.memory if row["rank"] not in gone(run)],
        "derived": derived(run, now["rate"]),
        "marks": list(run.marks),
        "faults": faults(run),
        "metrics": dict(run.metrics),
        "metrics_step": run.metrics_step,
        "checkpoints": list(run.saved),
        "saving": run.saving.now,
        "events": list(run.events),
        "engines": rows,
        "pending": run.pending,
        "allowed": [] if run.pending else list(ALLOWED.get(run.state, ())),
    }


def faults(run: Run) -> dict[str, Any]:
    """What was lost, what it cost, and what is done about the next loss."""
    history, roster = run.history, run.engines.roster
    return {
        **run.outages.totals(history.wall_s, history.timed_steps),
        "outages": [outage.to_dict() for outage in run.outages.all],
        "policy": run.outages.policy,
        "on_stall": run.watch.policy,
        "spares": roster.num_ready(),
        "under_way": run.faults.under_way(),
        # What it could go on with where it waits for a word about that.
        "smaller": str(rescue.smaller(run) or "") if gone(run) else "",
    }


def derived(run: Run, rate: float | None) -> dict[str, Any]:
    """What follows from what was measured: utilisation, and the bubble of a pipeline.

    rate: as History.now has it. mfu: operations of the model done, of those the ranks could do, all
    of them busy at once; None where more were done than the peak, which then is none.
    """
    layout, flops = run.layout, run.about.get("flops")
    per_step = flops * run.about["batch"] if flops else None
    peak = sum(run.peaks[: layout.world_size])
    steps_per_s = rate / run.history.units_per_step if rate else None
    mfu = per_step * steps_per_s / peak if per_step and steps_per_s and peak else None
    last = run.history.samples[-1] if run.history.samples else None
    is_pipeline = layout.pp > 1
    return {
        "flops": per_step,
        "peak_flops": peak or None,
        "mfu": mfu if mfu is not None and mfu <= 1 else None,
        "bubble": bubble(last) if last and is_pipeline else None,
        "bubble_formula": (
            layout.order.bubble(layout.pp, layout.microbatches) if is_pipeline else None
        ),
    }


def gone(run: Run) -> list[int]:
    """The ranks that were lost and have no successor yet."""
    return [] if run.engines.stopped else run.engines.roster.gone()


def places(run: Run) -> list[dict[str, Any]]:
    """For each rank where it lies in the layout, its samples of the batch, what it holds.

    is_gone: it holds nothing, until another has its place.
    """
    layout, batch, lost = run.layout, run.about["batch"], gone(run)
    found = []
    for rank in range(run.engines.num_ranks):
        if rank >= layout.world_size:
            nowhere = {"pp": None, "dp": None, "tp": None, "stages": [], "samples": [], "held": 0.0}
            found.append({"rank": rank, "idle": True, "is_gone": rank in lost, **nowhere})
            continue
        where = layout.coordinate(rank)
        share = layout.share(rank)
        # As engine/data.py cuts it: the first shares take one more where it does not divide.
        ends = [batch // layout.dp * n + min(n, batch % layout.dp) for n in (share, share + 1)]
        found.append(
            {
                "rank": rank,
                "idle": False,
                "is_gone": rank in lost,
                "pp": where["pp"],
                "dp": share,
                "tp": where["tp"],
                "stages": layout.stages(rank) if layout.pp > 1 else [],
                "samples": ends,
                "held": 0.0 if rank in lost else run.held[rank],
            }
        )
    return found


def totals(run: Run) -> dict[str, Any]:
    """First and last loss, mean rate, shares of communication and waiting over all steps, saves."""
    history = run.history
    steps_per_s = history.timed_steps / history.wall_s if history.wall_s else None
    return {
        "loss_first": history.loss[0] if history.loss else None,
        "loss_last": history.last_loss(),
        "rate": steps_per_s and steps_per_s * history.units_per_step,
        "comm": history.comm_s / history.wall_s if history.wall_s else None,
        "idle": history.idle_s / history.wall_s if history.wall_s else None,
        "saves": run.num_saves,
    }
