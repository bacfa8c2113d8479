"""Attach: a kernel takes over ranks and training that another one has left.

Whatever the other kernel had queued is done first, since requests come to a rank in order. Then
each process says who it is and what it holds (engine/present.py). The driver's side is built anew
from that, from the card of the cluster, the diary of the run, and the journals of its ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

from workbench.driver import (
    alone,
    card,
    clusters,
    commands,
    current,
    diary,
    journals,
    recovery,
    salvage,
    session,
    watching,
)
from workbench.driver.card import Card, this_kernel
from workbench.driver.claim import claimed
from workbench.driver.clusters import Cluster, does_not_answer
from workbench.driver.engines import Engines
from workbench.driver.launchers import Launched
from workbench.driver.launchers.local import LocalProcesses
from workbench.driver.mail import Mail
from workbench.driver.member import Member
from workbench.driver.rescue import bring_back, refill, trained_by
from workbench.driver.run import Run
from workbench.driver.sample import joined
from workbench.driver.session import Session
from workbench.driver.tensorboard import EventFile
from workbench.errors import EnginesError, InputError, WorkbenchError
from workbench.spec import pulse
from workbench.spec.layout import Layout
from workbench.spec.options import TrainOptions
from workbench.spec.timeouts import Timeouts

POLL_S = 0.05
# Ranks end their slices together, so that whoever has not answered so long after another waits for
# one that does not come.
TOGETHER_S = 1.0
# Attempts to meet that the other kernel may have begun, which leave something in the store.
UNTRIED = 1000
NO_END = 1 << 62  # more steps than anybody takes
NOBODY = (0, 0.0)
AS_IT_WAS = (
    "goal", "metrics", "metrics_step", "marks", "num_saves", "events", "peaks", "origin",
)  # fmt: skip
GONE = "ended while no kernel was there"
Told = dict[str, Any]


def attach(which: str | None = None, *, take_over: bool = False) -> Engines:
    """Take over the ranks of a kernel that is gone, and their training -> its engines.

    which: the number of the cluster in `clusters.others()`, or the name of its run; default the
    only one. take_over: also from a kernel that lives, which hands it over between two steps. A
    training that was running goes on.

    Raises EnginesError where there is none, it is another kernel's, another one attaches to it just
    now, or its ranks do not answer; InputError where it is not clear which is meant.
    """
    return attach_to(clusters.chosen(which), take_over=take_over)


def attach_to(cluster: Cluster, *, take_over: bool = False) -> Engines:
    """`attach`, to this cluster."""
    with claimed(cluster, take_over=take_over) as now:
        return _attached(now)


def _attached(cluster: Cluster) -> Engines:
    # Before the other one leaves, so that there is always somebody who holds the lease.
    held = session.join(cluster.directory.parent)
    try:
        if cluster.card.is_controlled:
            watching.take_from(cluster)
            cluster = Cluster(cluster.directory, card.read(cluster.directory) or cluster.card)
        engines = _taken(held, cluster)
    except BaseException:
        if id(held.forks) not in _forks_in_use():
            session.drop(held)
        if cluster.is_own:  # handed over, and then it did not answer: whoever wants may try again
            dataclasses.replace(cluster.card, kernel=NOBODY).write(cluster.directory)
        raise
    _leave_idle_sessions(held)
    held.own()
    dataclasses.replace(cluster.card, kernel=this_kernel()).write(cluster.directory)
    engines.open()
    current.remember(engines)
    if engines.run is not None:
        refill(engines.run)
    return engines


def _leave_idle_sessions(held: Session) -> None:
    """The joined fork server forks what is started next: this kernel's own waits for nothing."""
    in_use = _forks_in_use()
    session.keep(lambda one: one is held or id(one.forks) in in_use)


def _forks_in_use() -> set[int]:
    return {id(engines.processes.forks) for engines in current.all_engines()}  # type: ignore[attr-defined]


def _taken(held: Session, cluster: Cluster) -> Engines:
    of, directory = cluster.card, cluster.directory
    timeouts = Timeouts(of.timeout_s)
    processes = LocalProcesses.found(held.forks, directory, len(of.places))
    if not processes.controller_pid or not processes.pids:
        raise EnginesError(
            f"Of {cluster.name} no {'rank' if processes.controller_pid else 'controller'} is "
            "left. %dist_stop --all removes the rest, %dist_start starts new ranks."
        )
    _end_newcomers(processes)
    is_new = processes.renew_controller(timeouts.freed_s)
    alone.stop(directory, processes.pids.values(), timeouts.total_s)
    connection_file = directory / "security" / "ipcontroller-client.json"
    mail = Mail(connection_file, timeouts.total_s)
    try:
        if is_new:
            mail.controller_came_back(timeouts.total_s)
        told = _presented(mail, processes, timeouts.total_s)
        members = _members(told, of)
        launched = Launched(processes, connection_file, directory)
        engines = Engines(launched, of.places, timeouts, of.num_spares, members)
    except BaseException:
        mail.close()
        raise
    engines.roster.rejoin(mail, mail.engines(), timeouts.total_s)
    engines.attempt = UNTRIED + max(info["attempt"] for _id, info in told.values())
    engines.echo.numbers = itertools.count(1 + max(info["cells"] for _id, info in told.values()))
    try:
        by_rank = {info["rank"]: info for _id, info in told.values()}
        _take_run(engines, dict(sorted(by_rank.items())), of.run)
    except BaseException:
        let_go(engines)
        raise
    return engines


def _end_newcomers(processes: LocalProcesses) -> None:
    """Those that were made when the other kernel ended, and that nobody has told who they are.

    What was to become of them is not known; a spare that lacks is made anew.
    """
    newcomers = [key for key in processes.pids if not pulse.path_of(processes.log(key)).exists()]
    if newcomers:
        processes.signal(newcomers, signal.SIGKILL)
        for key in newcomers:
            del processes.pids[key]


def let_go(engines: Engines) -> None:
    """Close what this kernel holds of ranks that live on."""
    engines.echo.stop()
    if engines.roster.mail is not None:
        engines.roster.mail.close()


def _presented(
    mail: Mail, processes: LocalProcesses, limit_s: float
) -> dict[int, tuple[int, Told]]:
    """By key the id of each process that lives, and what it says of itself."""
    deadline_s = time.monotonic() + limit_s
    ids = mail.engines()
    told: dict[int, tuple[int, Told]] = {}
    # Ids of processes that are gone are not forgotten; from them nothing comes.
    waiting = dict(zip(mail.post(ids, "present", ()), ids, strict=True))
    gone: set[int] = set()
    for key in processes.pids:
        processes.on_exit(key, lambda _code, key=key: gone.add(key))
    free_s = deadline_s
    while missing := processes.pids.keys() - told.keys() - gone:
        if time.monotonic() > deadline_s:
            raise does_not_answer(set(missing), {})
        if time.monotonic() > free_s:
            # The other kernel may have died when a slice was sent to some ranks and not to all.
            processes.signal(list(missing), signal.SIGUSR1)
            free_s = deadline_s
        done, _ = wait(waiting, POLL_S, FIRST_COMPLETED)
        for future in done:
            engine_id, reply = waiting.pop(future), future.result()
            if not isinstance(reply, dict) or "value" not in reply:
                raise EnginesError(f"A rank could not say what it holds: {reply}")
            told[reply["value"]["key"]] = engine_id, reply["value"]
        if done and free_s == deadline_s:
            free_s = time.monotonic() + TOGETHER_S
    return told


def _members(told: dict[int, tuple[int, Told]], card: Card) -> list[Member]:
    """Ranks in their order, those that are gone among them, then spares."""
    world = max((info for _id, info in told.values()), key=lambda info: info["attempt"])
    ranks: list[Member] = []
    # Without a world they were on the way to the next one.
    for rank in range(world["size"] or len(card.places)):
        place = card.places[rank]
        found = [
            key
            for key, (_id, info) in told.items()
            if (info["rank"], info["attempt"]) == (rank, world["attempt"])
        ]
        member = Member(found[0] if found else -1, place)
        if found:
            member.id, member.info = told[found[0]]
        else:
            member.info = {"key": -1, "pid": None, "host": world["host"], "threads": 0, "log": ""}
            member.lose(GONE)
        ranks.append(member)
    in_ranks = {member.key for member in ranks}
    spares = []
    for key, (engine_id, info) in told.items():
        if key not in in_ranks:
            spares.append(Member(key, None))
            spares[-1].id, spares[-1].info = engine_id, info
    return [*ranks, *spares]


def _take_run(engines: Engines, told: dict[int, Told], directory: str | None) -> None:
    """Build the handle of the training that the ranks hold, if they hold one.

    directory: of the one that they held last. They hold none where a recovery broke off.
    """
    holding = [info["training"] for info in told.values() if info["training"] is not None]
    first = holding[0] if holding else None
    directory = first["directory"] if first is not None else directory
    kept = diary.read(directory) if directory else None
    if not directory or kept is None or (first is None and kept["state"] == "gone"):
        return  # there was none, or its kernel was gone before it knew of it
    layout = Layout(**(kept if first is None else first)["layout"])
    run = Run(engines, kept["about"], TrainOptions(**kept["options"]), Path(directory), layout)
    for name in AS_IT_WAS:
        setattr(run, name, kept[name])
    run.outages.recall(kept["outages"])
    run.faults.recall(kept["faults"])
    engines.cells.extend((number, text) for number, text in kept["cells"])
    if first is None:
        run.lay_out(layout, [{"stages": kept["stages"], "held": held} for held in kept["held"]])
        journals.recall(run.history, run.directory, NO_END, layout)
        run.step_now = run.history.steps[-1] if run.history.steps else 0
    else:
        steps = [one["step"] for one in holding if one["layout"] == first["layout"]]
        run.step_now = max(steps[: layout.world_size])
        lying = [told.get(rank, {}).get("training") or first for rank in range(engines.num_ranks)]
        run.lay_out(layout, lying)
        _recall(run, kept["logs"], [info["unwritten"] for info in told.values()])
        _show_last(run, lying)
    run.history.branches = kept["branches"]
    run.saved = run.checkpoints()
    _note_saves(run, diary.written_s(directory))
    if kept["tensorboard"]:
        run.event_file = _event_file(kept["tensorboard"], run)
    engines.run = run
    _know_again(run)
    run.set_state("paused" if kept["state"] == "gone" else kept["state"], kept["message"])
    _settle(run, told, is_held=first is not None)
    run.take_up()


def _know_again(run: Run) -> None:
    """Find out which processes know the training, and have the others get ready for it."""
    members = [one for one in run.engines.roster.members if not one.gone]
    futures = run.engines.ask(members, "facts")
    found = [future.result() for future in futures]
    knowing = [one for one, facts in zip(members, found, strict=True) if facts]
    if not knowing:
        raise EnginesError(
            f"{run.name} was lost when its kernel ended in a recovery. %dist_stop --all ends the "
            f"ranks; %dist_train ... --restore {run.directory} goes on from its last checkpoint."
        )
    trained_by(run, knowing, next(filter(None, found)))


def _recall(run: Run, logs: list[str], unwritten: list[str]) -> None:
    """Have the history again; of ranks that were lost meanwhile, what they left.

    logs: by rank. unwritten: what the disk has not taken, of each rank that lives.
    """
    step, world, members = run.step_now, run.layout.world_size, run.engines.roster.members
    for rank, log in enumerate(logs[:world]):
        if rank < len(members) and members[rank].gone:
            members[rank].info["log"] = log
            salvage.complete(run.directory, rank, world, log)
    journals.recall(run.history, run.directory, step, run.layout, unwritten)
    done = run.history.steps[-1] if run.history.steps else 0
    if done == step - 1:
        # Some have finished it and others have not.
        run.step_now = done
        told = journals.rest(run.directory, world, step)
        run.outages.leftover = [{**one, "log": logs[one["rank"]]} for one in told]
        salvage.close_gap(run, step)
        run.step_now = step
    _tell_of_gaps(run)


def _tell_of_gaps(run: Run) -> None:
    """Steps that were taken, and that no journal has."""
    began = run.origin["step"] + 1 if run.origin is not None else 1
    known = set(run.history.steps)
    first = min([began, *run.history.steps[:1]])
    if lacking := [n for n in range(first, run.step_now + 1) if n not in known]:
        run.happened(
            "unknown_steps", count=f"{len(lacking):,}", first=f"{lacking[0]:,}",
            last=f"{lacking[-1]:,}",
        )  # fmt: skip


def _settle(run: Run, told: dict[int, Told], *, is_held: bool) -> None:
    """Do what the other kernel would have done next: about an error, or at the goal.

    is_held: whether the ranks hold the training.
    """
    if run.engines.roster.gone():
        run.look()  # its thread brings them back
        return
    errors = {
        rank: info["training"]["error"]
        for rank, info in told.items()
        if info["broken"] and info["training"] and info["training"]["error"]
    }
    try:
        if not is_held:
            bring_back(run, "the kernel ended in a recovery")
            return
        if any(error["name"] != "WorldLostError" for error in errors.values()):
            recovery.recover(run, errors)
        if any(info["broken"] for info in told.values()):
            _meet_again(run)
        if run.state == "running" and run.step_now >= run.goal:
            commands.measure(run)
            run.happened("finished", step=run.step_now)
            run.set_state("finished")
    except WorkbenchError as error:
        run.fail(error)


def _meet_again(run: Run) -> None:
    """Bring ranks that lost each other to one step, and nothing else has happened."""
    run.engines.rejoin()
    first, last = recovery.level(run)
    if first != last:
        bring_back(run, recovery.LOST_EACH_OTHER)
        return
    run.step_now = last
    run.feeder.reset(last)


def _note_saves(run: Run, since_s: float) -> None:
    """Mark in the curves what was saved while no kernel was there."""
    for one in run.saved:
        if one["time_s"] > since_s and one["by_itself"]:
            run.marks.append({"step": one["step"], "label": "saved"})
            run.num_saves += 1


def _show_last(run: Run, lying: Iterable[Told]) -> None:
    """The picture of the last step, and what memory is used for, as the last slice told."""
    taking = list(lying)[: run.layout.world_size]
    samples = [one["sample"] for one in taking if one["sample"]]
    if len(samples) == len(taking) and len({one["step"] for one in samples}) == 1:
        run.history.samples.append(joined(samples, run.layout))
    if all(one["memory"] for one in taking):
        run.memory = [{"rank": rank, **one["memory"]} for rank, one in enumerate(taking)]


def _event_file(folder: str, run: Run) -> EventFile | None:
    """Another file for TensorBoard, which goes on where the one of the other kernel ended."""
    try:
        file = EventFile(folder)
    except InputError as error:
        run.tell("warning", str(error))
        return None
    file.rewind(run.step_now)
    return file
