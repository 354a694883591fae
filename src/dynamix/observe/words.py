"""Findings and gains in plain words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from dynamix.observe.findings import HOLDS_BACK, LEAST_EXCESS, Findings, Slow
from dynamix.observe.gains import ADAPT, ALONE, BALANCE, MEET, PLAIN, WITHOUT, WORTH, Gain, Gains, Pays
from dynamix.observe.joined import Joined

PARTS = {
    "forward": "forward pass and loss",
    "backward": "backward pass",
    "computing": "forward and backward passes alike",
    "data": "waiting for its data loader",
    "update": "optimizer step",
    "between": "what its loop does between steps",
}
SEVERAL_MACHINES = (
    "On several machines, write torchrun ... -m dynamix.observe --out FOLDER train.py, with a folder that all of them "
    "share. Or copy the ranks folder of each machine into this run folder, and call dynamix observe --read RUN_FOLDER."
)
_SHORT = {"forward": "forward", "backward": "backward", "data": "data", "update": "update", "between": "between steps"}
_SHOWN = 8  # ranks that are listed one by one


def tell(job: Joined, found: Findings, gains: Gains, pays: Pays, exit_code: int | None = None) -> str:
    """The report of an observed job: the rung to begin with, the promise of each rung, and the reasons.

    exit_code   of the job's command; None while it runs, or if it is not known
    """
    lines = [_head(job, found), ""]
    if job.world > 1:
        lines += [*_best(job, gains, pays), *_promises(job, found, gains, pays), ""]
    lines += [*_verdict(job, found), *_waiting(job, found), *_table(job, found), *_notes(job, gains, exit_code)]
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    """Sentences in lines of at most 110 characters. Commands and the table are not changed."""
    fill = textwrap.TextWrapper(110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(line if line.startswith(" ") else fill(line) for line in text.split("\n"))


def _head(job: Joined, found: Findings) -> str:
    seconds = float(np.nanmax(job.part("end_s"))) if job.steps else 0.0
    what = ", ".join(str(job.facts[0].get(name, "?")) for name in ("stack", "device"))
    ranks = f"{len(job.ranks)}{f' of {job.world}' if job.missing else ''} rank{'s' if job.world > 1 else ''}"
    return (
        f"{ranks}, {job.steps} steps in {seconds:.0f} s ({what}); a step takes {_ms(found.step_s)}. "
        "Nothing of the training was changed."
    )


def _verdict(job: Joined, found: Findings) -> list[str]:
    if len(job.ranks) < 2:
        here = "Only one rank's files are here, so ranks cannot be compared."
        return [here if job.missing else "There is only one rank, so no rank waits."]
    network = _network(found)
    if found.verdict == "even":
        return [f"No rank holds the job back: all take about {_ms(float(np.median(found.busy_s)))} a step."]
    if found.verdict == "changing":
        return ["In each step some rank is late, but it is not always the same one."]
    told = _slow(found.slow, found.step_s) if found.slow is not None else []
    return [network, *told] if found.verdict == "network" else [*told, *([network] if network else [])]


def _slow(slow: Slow, step_s: float) -> list[str]:
    much = slow.busy_s - slow.others_s >= HOLDS_BACK * step_s
    said = "holds the job back" if much else "is somewhat slower than the others"
    factor = slow.busy_s / max(slow.others_s, 1e-9)
    excess = {name: seconds for name, seconds in slow.excess_s.items() if abs(seconds) >= 0.0005}
    by_part = ", ".join(f"{_SHORT[name]} {1e3 * seconds:+.0f} ms" for name, seconds in excess.items())
    compared = f" ({by_part} compared with the others, as the median of its slow steps)" if excess else ""
    return [
        f"Rank {slow.rank} {said}{'' if slow.steady else ' at times'}: its own work takes {_ms(slow.busy_s)} a step, "
        f"that of the others {_ms(slow.others_s)} ({factor:.2f} times as long).",
        f"Its slow part: {PARTS[slow.part]}{compared}. It was slow in {slow.often:.0%} of the steps.",
    ]


def _network(found: Findings) -> str:
    share = found.transfer_s / found.step_s if found.step_s else 0.0
    if found.verdict != "network" and share < 0.05:
        return ""
    said = f"In each step {_ms(found.transfer_s)} ({share:.0%}) go to the network while nothing computes."
    if len(found.slow_link) == 1:
        said += f" The connections of rank {found.slow_link[0]} are slow: round trips over them take "
        said += f"{found.link_ratio:.0f} times as long as over the others."
    elif found.verdict == "network" and np.isnan(found.link_ratio):
        said += " This run does not show whose connection is slow."
    return said


def _waiting(job: Joined, found: Findings) -> list[str]:
    share = float(np.nanmean(found.wait_s)) / found.step_s if found.step_s else 0.0
    if len(job.ranks) < 2 or not share >= LEAST_EXCESS or found.verdict == "even":
        return []
    whom = f"rank {found.slow.rank}" if found.slow is not None else "the latest of each step"
    return [f"Waiting for {whom} takes {share:.0%} of all ranks' time."]


def _table(job: Joined, found: Findings) -> list[str]:
    """Milliseconds a step by rank and part."""
    names = list(found.parts)
    rows = [["rank", *(_SHORT[name] for name in names), "own work", "waits"]]
    order = sorted(np.argsort(-found.busy_s)[:_SHOWN].tolist())
    for i in order:
        values = [*(float(found.parts[name][i]) for name in names), float(found.busy_s[i]), float(found.wait_s[i])]
        rows.append([str(job.ranks[i]), *(f"{1e3 * value:.1f}" if np.isfinite(value) else "?" for value in values)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    title = "Milliseconds a step" + (f" of the {_SHOWN} slowest ranks:" if len(order) < len(job.ranks) else ":")
    return ["", title, *lines]


def _best(job: Joined, gains: Gains, pays: Pays) -> list[str]:
    """The rung that is predicted to be best, and the line to write."""
    best, alone, without = pays.best, pays.alone, pays.without
    if job.missing:
        said = f"{_who(job.missing)} no files here: on a machine that cannot see this run folder, or dead. Nothing is "
        return [f"{said}predicted, and waiting for what is missing counts as the network's time.", SEVERAL_MACHINES]
    if job.facts[0].get("controller"):
        said = "This job uses dynamix.Controller already, so advice for a job without it does not apply. "
        return [said + "To measure what the controller gains, write dynamix compare -- torchrun ... train.py."]
    if best is None:
        return ["There is no prediction: it needs a few complete steps."]
    if best == PLAIN:
        return [f"Nothing to gain: stay with plain {job.facts[0].get('stack', 'DDP')}. There is nothing to write."]
    if best == ALONE and alone is not None:
        said = "Do not distribute this job: one worker alone is at least as fast as all together."
        return [said, _start(job, alone.rank, alone=True)]
    if best == WITHOUT and without is not None:
        times = f"{without.median:.2f} times as many samples a second as all ranks do now"
        said = f"Leave rank {without.rank} out: the others would train {times}."
        return [said, _start(job, without.rank, alone=False)]
    share = f"the exchange takes {pays.exchange:.0%} of a balanced step"
    said, words = {
        BALANCE: ("Begin with balance: shares move, the global batch stays.", ""),
        ADAPT: (f"Adapt: {share}, and a larger batch exchanges less often.", ", global_batch='adaptive'"),
        MEET: (f"Adapt and choose how to meet: {share}.", ", global_batch='adaptive', meet='auto'"),
    }[best]
    size = round(sum(gains.now) / len(gains.now) / gains.pieces) if gains.sizes_known else "YOUR_BATCH_SIZE"
    pieces, loop = (f", accumulate={gains.pieces}", "loop") if gains.pieces > 1 else ("", "tutorial")
    line = f"    dynamix.Controller(policy='goodput', batch_size={size}{pieces}{words})"
    return [said, f"{line}  # docs/{loop}.md has the other lines"]


def _start(job: Joined, rank: int | None, *, alone: bool) -> str:
    """What to start on the host of `rank`: the script on its GPU alone, or on the GPUs of the host's other ranks."""
    own = next(one for one in job.facts if one["rank"] == rank)
    kept = [one for one in job.facts if one.get("host") == own.get("host") and (one is own) == alone]
    where = f"on host {own.get('host', f'of rank {rank}')}{'' if alone else ', any other host as before'}"
    if not kept:
        return f"    # your command, but nothing {where}"
    named = ",".join(dict.fromkeys(one["gpus"] for one in kept if one.get("gpus")))  # ranks may share a GPU
    program = f"CUDA_VISIBLE_DEVICES={named} torchrun" if named else "torchrun"
    return f"    {program} --nproc-per-node {len(kept)} train.py  # your script, {where}"


def _promises(job: Joined, found: Findings, gains: Gains, pays: Pays) -> list[str]:
    """The promise of each rung, and the condition for it."""
    told, holds, slow = [], _holds(found.slow, found.verdict), found.slow
    if pays.alone is not None:
        fits = " if the model fits it," if job.facts[0].get("stack") == "FSDP2" else ""
        why = "while the network stays as slow" if found.verdict == "network" else holds
        told.append(f"Rank {pays.alone.rank} alone, with its own batch:{fits} {_times(pays.alone)}, {why}.")
    if pays.without is not None:
        kept = "if the others' batches and the exchange stay as they are"
        told.append(f"Without rank {pays.without.rank}, {kept}: {_times(pays.without)}, {holds}.")
    if pays.balance is not None:
        shares, unit = "", "" if gains.sizes_known else " thousandths of today's batch"
        if pays.follows:
            shares = ", with shares that lag the speeds by some steps"
        elif pays.balance.worth_it:
            shares = f", with shares of {_sizes(gains.sizes)}{unit} in place of {_sizes(gains.now)}"
        told.append(f"Balance: {_times(pays.balance)}{shares}, {holds}.")
        if not pays.balance.worth_it and gains.grounded and slow is not None and slow.steady:
            told[-1] += f" The batch size hardly changes how slow rank {slow.rank} is: a smaller batch does not help."
        meeting = f"Adapt and choose how to meet, every {gains.apart:.0f} steps on average"
        for name, gain in (("Adapt, twice the global batch", gains.adapt), (meeting, gains.meet)):
            if gain is not None and gain.median >= WORTH * max(pays.balance.median, 1.0):
                told.append(f"{name}: {_times(gain)} in time alone, while the network stays as it is.")
    told = ["Predicted samples a second, as a multiple of today's (ranges in brackets):", *(f"- {x}" for x in told)]
    if pays.balance is not None and not gains.grounded:
        told.append("Every rank was seen with one batch size only, so the fixed cost of a step is not measured:")
        told[-1] += " the ranges of balance and of the lines below it are typical ones."
    return told if len(told) > 1 else []


def _holds(slow: Slow | None, verdict: str) -> str:
    """The condition on the ranks' slowness under which a promise holds."""
    if slow is None:
        return "if slowness comes and goes as it did" if verdict == "changing" else "while ranks stay as they are"
    return f"if rank {slow.rank} {'stays as slow' if slow.steady else 'is slow as often as in this run'}"


def _notes(job: Joined, gains: Gains, exit_code: int | None) -> list[str]:
    told = []
    if not gains.sizes_known:
        told.append("The batch size is unknown: the inputs of the forward pass hold no tensor.")
    if job.pauses:
        at = ", ".join(map(str, job.pauses[:5])) + (", ..." if len(job.pauses) > 5 else "")
        steps = "1 step had a pause" if len(job.pauses) == 1 else f"{len(job.pauses)} steps had a pause"
        told.append(f"{steps} (a checkpoint, an evaluation?), not counted in the figures: {at}.")
    if job.unfinished:
        why = "still running, or dead" if exit_code is None else f"the command ended first, with exit code {exit_code}"
        told.append(f"{_who(job.unfinished)} not reported the end of training: {why}.")
    if job.attempt:
        times = "once" if job.attempt == 1 else f"{job.attempt} times"
        told.append(f"The job was restarted {times}; this report is about the last start.")
    told += sorted({str(facts["note"]) for facts in job.facts if facts.get("note")})
    return ["", *(f"Note: {line}" for line in told)] if told else []


def _who(ranks: list[int]) -> str:
    return f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {_sizes(ranks)} have"


def _times(gain: Gain) -> str:
    return f"{gain.median:.2f} times ({gain.low:.2f} to {gain.high:.2f})"


def _sizes(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:_SHOWN]))
    return shown + (", ..." if len(sizes) > _SHOWN else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f} ms"
