"""Findings and gains in plain words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamix.observe.findings import Findings, Slow
from dynamix.observe.gains import WORTH, Gain, Gains
from dynamix.observe.joined import Joined

PARTS = {
    "forward": "forward pass and loss",
    "backward": "backward pass",
    "computing": "forward and backward passes alike",
    "data": "waiting for its data loader",
    "update": "optimizer step",
    "between": "what its loop does between steps",
}
_SHORT = {"forward": "forward", "backward": "backward", "data": "data", "update": "update", "between": "between steps"}
_SHOWN = 8  # ranks named one by one


def tell(job: Joined, found: Findings, gains: Gains) -> str:
    """The report of an observed job."""
    lines = [_head(job, found), "", *_verdict(job, found), *_waiting(job, found), *_table(job, found)]
    lines += ["", *_gains(gains, found.slow), *_notes(job, gains)]
    return "\n".join(lines) + "\n"


def _head(job: Joined, found: Findings) -> str:
    about = job.facts[0]
    seconds = float(np.nanmax(job.part("end_s"))) if job.steps else 0.0
    what = f"{about.get('stack', '?')}, {about.get('device', '?')}"
    return (
        f"{len(job.ranks)} ranks, {job.steps} steps in {seconds:.0f} s ({what}); a step takes {_ms(found.step_s)}. "
        "Nothing of the training was changed."
    )


def _verdict(job: Joined, found: Findings) -> list[str]:
    if len(job.ranks) < 2:
        return ["One rank alone waits for nobody."]
    slow = found.slow
    network = _network(found)
    if found.verdict == "even":
        return [f"No rank holds the job back: all take about {_ms(float(np.median(found.busy_s)))} a step."]
    if found.verdict == "changing":
        return [
            "In each step some rank is late, but it is not always the same one: balancing by mean speed gains little."
        ]
    told = _slow(slow) if slow is not None else []
    return [network, *told] if found.verdict == "network" else [*told, *([network] if network else [])]


def _slow(slow: Slow) -> list[str]:
    factor = slow.busy_s / max(slow.others_s, 1e-9)
    excess = {name: seconds for name, seconds in slow.excess_s.items() if abs(seconds) >= 0.0005}
    by_part = ", ".join(f"{_SHORT[name]} {1e3 * seconds:+.0f} ms" for name, seconds in excess.items())
    return [
        f"Rank {slow.rank} holds the job back: its own work takes {_ms(slow.busy_s)} a step, that of the others "
        f"{_ms(slow.others_s)} ({factor:.2f} times as long).",
        f"It is slow in this: {PARTS[slow.part]} ({by_part} beside the others). "
        f"It arrives last in {slow.late:.0%} of the steps.",
    ]


def _network(found: Findings) -> str:
    share = found.transfer_s / found.step_s if found.step_s else 0.0
    if found.verdict != "network" and share < 0.05:
        return ""
    said = f"The network takes {_ms(found.transfer_s)} of each step that no computing hides ({share:.0%})."
    if len(found.slow_link) == 1:
        said += f" The connections of rank {found.slow_link[0]} are slow: round trips over them take "
        said += f"{found.link_ratio:.0f} times as long as over the others."
    elif found.verdict == "network" and np.isnan(found.link_ratio):
        said += " Whose connection is slow cannot be seen here."
    return said


def _waiting(job: Joined, found: Findings) -> list[str]:
    wait = found.wait_s
    if len(job.ranks) < 2 or not np.isfinite(wait).any() or found.verdict == "even":
        return []
    whom = f"rank {found.slow.rank}" if found.slow is not None else "the latest of each step"
    order = [i for i in np.argsort(-np.nan_to_num(wait)) if wait[i] >= 0.01 * found.step_s][:_SHOWN]
    if not order:
        return []
    each = ", ".join(f"rank {job.ranks[i]} {_ms(float(wait[i]))}" for i in sorted(order))
    share = float(np.nanmean(wait)) / found.step_s if found.step_s else 0.0
    return [f"Waiting for {whom}, a step: {each}. That is {share:.0%} of all ranks' time."]


def _table(job: Joined, found: Findings) -> list[str]:
    """Milliseconds a step by rank and part."""
    names = list(found.parts)
    rows = [["rank", *(_SHORT[name] for name in names), "own work", "waits"]]
    order = list(range(len(job.ranks)))
    if len(order) > _SHOWN:
        order = sorted(np.argsort(-found.busy_s)[:_SHOWN].tolist())
    for i in order:
        values = [*(float(found.parts[name][i]) for name in names), float(found.busy_s[i]), float(found.wait_s[i])]
        rows.append([str(job.ranks[i]), *(f"{1e3 * value:.1f}" if np.isfinite(value) else "?" for value in values)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    title = "Milliseconds a step" + (f" of the {_SHOWN} slowest ranks:" if len(order) < len(job.ranks) else ":")
    return ["", title, *lines, f"exchange that nothing hides: {1e3 * found.transfer_s:.1f}"]


def _gains(gains: Gains, slow: Slow | None) -> list[str]:
    if gains.balance is None or gains.twice is None:
        return ["What could be gained is not known: that needs two ranks or more and a few whole steps."]
    told = ["What could be gained (predicted; 80 % sure ranges in brackets), as samples a second:"]
    unit = "" if gains.sizes_known else " thousandths of today's batch"
    shares = f", with shares of {_sizes(gains.sizes)}{unit} in place of {_sizes(gains.now)}"
    if not gains.balance.worth_it:
        shares = ""
    told.append(f"- Balance alone, the global batch as it is: {_times(gains.balance)}{shares}.")
    if not gains.balance.worth_it and gains.grounded and slow is not None:
        told.append(f"  What makes rank {slow.rank} slow hardly depends on its batch: a smaller one does not help.")
    told.append(
        f"- Twice the global batch, balanced: {_times(gains.twice)}. Whether samples then teach as much was not"
    )
    told.append("  seen: a Controller with global_batch='adaptive' measures it while it trains.")
    if gains.rarely is not None:
        steps = f"every {gains.apart:.0f} steps in the mean"
        told.append(f"- Meeting less often, over parameters {steps}: {_times(gains.rarely)} as far as time goes.")
    if not gains.grounded:
        told.append(
            "Every rank was seen at one batch size only, so what a step costs beside its samples is not measured."
        )
        told.append("The ranges say what is usual.")
    return [*told, "", *_lines(gains)]


def _lines(gains: Gains) -> list[str]:
    assert gains.balance is not None
    if not gains.balance.worth_it and (gains.rarely is None or gains.rarely.median < WORTH):
        return ["Nothing to write: balance would gain nothing here."]
    told = _to_balance(gains) if gains.balance.worth_it else []
    if not told:
        told.append("Balance alone would gain nothing here.")
    if gains.rarely is not None and gains.rarely.low > max(gains.balance.high, WORTH):
        told.append("To meet less often: Controller(..., meet='parameters'), the loop stays (docs/rounds.md).")
    return told


def _to_balance(gains: Gains) -> list[str]:
    size = round(sum(gains.now) / len(gains.now) / gains.pieces) if gains.sizes_known else "YOUR_BATCH_SIZE"
    pieces = f", accumulate={gains.pieces}" if gains.pieces > 1 else ""
    last = [
        "    with controller.piece():    # around forward and backward pass; docs/loop.md has the whole loop",
        "    controller.step(loss=loss)  # after every batch",
    ]
    return [
        "To balance, write (docs/tutorial.md has a whole script):",
        f"    controller = dynamix.Controller(policy='goodput', batch_size={size}{pieces})",
        "    loader = controller.loader(loader)   # your DataLoader; then loader.set_epoch(epoch)",
        "    controller.wrap(model, optimizer)    # model: the one under DDP or fully_shard",
        *(last if pieces else ["    controller.step(loss=loss)           # after optimizer.step()"]),
    ]


def _notes(job: Joined, gains: Gains) -> list[str]:
    told = []
    if not gains.sizes_known:
        told.append("How many samples a batch has is not known: no tensor was among the inputs of the forward pass.")
    if job.pauses:
        at = ", ".join(map(str, job.pauses[:5])) + (", ..." if len(job.pauses) > 5 else "")
        steps = "1 step held a pause" if len(job.pauses) == 1 else f"{len(job.pauses)} steps held a pause"
        told.append(f"{steps} (a checkpoint, an evaluation?), left out of all figures: {at}.")
    if job.missing:
        one = len(job.missing) == 1
        whose = f"Rank {job.missing[0]} has" if one else f"Ranks {_sizes(job.missing)} have"
        told.append(f"{whose} written nothing: {'it is' if one else 'they are'} on another machine without this")
        told[-1] += " folder, or dead."
    if job.unfinished:
        one = len(job.unfinished) == 1
        whose = f"Rank {job.unfinished[0]} has" if one else f"Ranks {_sizes(job.unfinished)} have"
        told.append(f"{whose} not said that {'it' if one else 'they'} ended: still running, or dead.")
    if job.attempt:
        times = "once" if job.attempt == 1 else f"{job.attempt} times"
        told.append(f"The job was restarted {times}; this is of the last start.")
    told += sorted({str(facts["note"]) for facts in job.facts if facts.get("note")})
    return ["", *(f"Note: {line}" for line in told)] if told else []


def _times(gain: Gain) -> str:
    return f"{gain.median:.2f} times ({gain.low:.2f} to {gain.high:.2f})"


def _sizes(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:_SHOWN]))
    return shown + (", ..." if len(sizes) > _SHOWN else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f} ms"
