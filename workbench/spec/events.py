"""Events: what happens to a run, by a name that a panel can say in another language."""

from __future__ import annotations

import time
from typing import Any

# Name -> (kind, English text). What an error, a warning or a note says is free text and has none.
EVENTS: dict[str, tuple[str, str]] = {
    "built": ("info", "{run}: {parameters} parameters, {layout}"),
    "paused": ("info", "paused after step {step}"),
    "resumed": ("info", "goes on from step {step} to {goal}"),
    "stopped": ("info", "stopped after step {step}"),
    "finished": ("info", "finished with step {step}"),
    "measured": ("info", "step {step}: {metrics}"),
    "profiled": ("info", "step {step} was taken under torch.profiler"),
    "nearest": ("info", "{file} has step {step}, the recorded one nearest to {asked}"),
    "exported": ("info", "exported {layout} as {file}"),
    "saved": (
        "save",
        "saved {name} at step {step}: {size}, the training stood {stall_ms} ms, written in "
        "{write_ms} ms",
    ),
    "restored": ("save", "restored {name} (step {step}, written as {layout})"),
    "copied": (
        "save",
        "step {step} is in the memory of two ranks each, {size} sent in {took_ms} ms; anew every "
        "{every} steps",
    ),
    "uncopied": (
        "info",
        "no copies in memory are needed under {layout}, or no other rank trains to keep them",
    ),
    "already": ("info", "already {strategy} ({layout})"),
    "attached": ("info", "another kernel took over after step {step}"),
    "unknown_steps": (
        "warning",
        "no journal has {count} steps from {first} to {last}: the curve lacks them, the training "
        "does not",
    ),
    "handed_over": ("info", "handed over to {who} after step {step}"),
    "controller_back": (
        "warning",
        "The controller was {how}; a new one took over after {took_s} s, nothing was lost.",
    ),
    "controller_stopped": (
        "warning",
        "The controller (process {process}) was stopped: another takes its place.",
    ),
    "spare_stopped": (
        "warning",
        "A spare (process {process}) was stopped: another takes its place.",
    ),
    "forks_stopped": (
        "warning",
        "The fork server (process {process}) is stopped, so that no rank can be started and nobody "
        "is told of one that ends: `kill -CONT {process}` lets it go on.",
    ),
    "lost": ("error", "{ranks} lost at step {step}: {why}"),
    "reunited": (
        "warning",
        "the ranks lost each other at step {step}, all are there and have met again after "
        "{took_ms} ms: it goes on",
    ),
    "recovered": (
        "info",
        "goes on from step {step}: {filled}, state from {source}, {lost} steps lost; "
        "ready {took_ms} ms after the loss, before the first step",
    ),
    "halted": (
        "warning",
        "{who}: the process is stopped for {for_s} s, by SIGSTOP or a debugger. SIGCONT lets it go "
        "on, %dist_replace {rank} replaces it.",
    ),
    "halted_awaited": (
        "warning",
        "{who}: the process is stopped for {for_s} s, by SIGSTOP or a debugger; held up: "
        "{waiting}. SIGCONT lets it go on, %dist_replace {rank} replaces it.",
    ),
    "busy": (
        "warning",
        "{who}: still in {phase} after {for_s} s{place}. %dist_interrupt ends the step, "
        "%dist_replace {rank} replaces the rank.",
    ),
    "busy_awaited": (
        "warning",
        "{who}: still in {phase} after {for_s} s{place}; held up: {waiting}. %dist_interrupt ends "
        "the step, %dist_replace {rank} replaces the rank.",
    ),
    "deadlock": (
        "warning",
        "The ranks wait for each other for {for_s} s: {standing}. %dist_interrupt ends the step.",
    ),
    "moves_again": ("info", "{who}: moves again after {for_s} s, nothing was lost"),
    "stall_ends": ("warning", "{who}: {policy} after {for_s} s, as --on-stall says"),
    "skipped": ("warning", "step {step}: the {cause}, so its update was left out on all ranks"),
    "diverging": (
        "warning",
        "The loss is {loss} at step {step}, for {steps} steps more than {factor} times its usual "
        "{usual}: try a lower learning rate or clip, or restore.",
    ),
    "fault": ("warning", "fault injected: {fault}"),
    "switched": (
        "switch",
        "{strategy} ({layout}) from step {step} on, in {took_ms} ms, {moved} moved between ranks",
    ),
}


def happened(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The event of that name as plain values: {"time_s", "kind", "text", "name", "values"}.

    Whole numbers are shown with separators of thousands.
    """
    kind, text = EVENTS[name]
    shown = {key: f"{of:,}" if isinstance(of, int) else str(of) for key, of in values.items()}
    told = {"kind": kind, "text": text.format(**shown), "name": name, "values": shown}
    return {"time_s": time.time(), **told}
