"""Ten jobs on device hosts: does distributing pay? Compares the report on the plain job with what each way reaches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dynamix.observe.gains import ALONE
from dynamix.observe.run import conclude
from dynamix_lab.suites.observe import job
from dynamix_lab.suites.observe.cases import observing
from dynamix_lab.suites.observe.gains import given_to, paced


def _job(
    speeds: tuple[float, ...], fixed_ms: float, per_sample_ms: float, rate: float | None = None, **more: Any
) -> dict[str, Any]:
    rates = (rate,) * len(speeds)
    return {"speeds": speeds, "fixed_ms": fixed_ms, "per_sample_ms": per_sample_ms, "rates": rates, "batch": 32, **more}


# Chosen by hand from the devices' times, before any of them ran. In the first five, one worker alone should be as fast
# as the best other way; in the last five it should not be. `slow` is the host that the way "without" leaves out.
JOBS: dict[str, dict[str, Any]] = {
    "slow-links-of-two": _job((1.0, 1.0), 5.0, 0.5, rate=25.0),  # 21 ms of computing, some 100 ms of exchange
    "slow-links-of-three": _job((1.0, 1.0, 1.0), 10.0, 0.5, rate=40.0),  # 26 ms, some 80 ms of exchange
    # 42 ms and 420 ms. For one sample the slow one takes 110 ms; the fast one computes 64 in 84.
    "a-tenth": _job((1.0, 0.1), 10.0, 1.0),
    "generations-and-links": _job((1.0, 0.5, 0.4, 0.3), 5.0, 0.25, rate=60.0, slow=3),  # 13 to 43 ms, some 60 ms
    "one-slow-link": _job((1.0, 1.0, 1.0), 3.0, 0.25, rates=(None, None, 100.0)),  # 11 ms, some 30 ms of exchange
    "even": _job((1.0, 1.0, 1.0), 15.0, 1.5),  # 63 ms
    # 42 ms and 84 ms. Unbalanced they are no faster than one alone, balanced 1.5 times as fast.
    "a-half": _job((1.0, 0.5), 10.0, 1.0),
    # Unbalanced they are a third as fast as one alone; two of them are twice as fast.
    "two-and-a-tenth": _job((1.0, 1.0, 0.1), 10.0, 1.0, slow=2),
    "comes-and-goes": _job(  # 63 ms, one of them 210 ms every other second
        (1.0, 1.0, 1.0),
        15.0,
        1.5,
        slow=2,
        schedule=[{"at_s": float(at), "host": 2, "cpu": 1.0 if at % 2 else 0.3} for at in range(60)],
    ),
    "bearable-links": _job((1.0, 1.0, 1.0), 15.0, 1.5, rate=80.0),  # 63 ms, some 40 ms of exchange
}
STEPS, WIDTH = 80, 256


def run_job(name: str, policy: str, folder: Path) -> dict[str, Any]:
    """The findings on the plain job, and samples a second relative to it that were reached: alone, without one,
    balanced."""
    place = JOBS[name]
    observed = folder / "observed"
    plain = paced(place, observing(observed, given_to(place, STEPS, WIDTH)), folder / "plain")
    gains = conclude(observed)["gains"]
    ways = {"balance": (place, {"policy": policy}), "alone": (_of(place, [0]), {})}  # host 0 is the fastest of each
    if "slow" in place:
        ways["without"] = (_of(place, [host for host in range(len(place["speeds"])) if host != place["slow"]]), {})
    reached = {}
    for way, (hosts, more) in ways.items():
        command = [sys.executable, job.__file__, json.dumps({**given_to(hosts, STEPS, WIDTH), **more})]
        reached[way] = paced(hosts, command, folder / way)
    over = {way: one["samples_per_s"] / plain["samples_per_s"] for way, one in reached.items()}
    pays = over["alone"] < max(1.0, *(pace for way, pace in over.items() if way != "alone"))
    return {
        "said": gains["best"],
        "pays": pays,
        "right": gains["best"] is not None and (gains["best"] == ALONE) != pays,
        "promised": {way: gains[way] for way in ("alone", "without", "balance")},
        "reached": over,
        "plain_samples_per_s": plain["samples_per_s"],
        "overruns": {"plain": plain["overruns"]} | {way: one["overruns"] for way, one in reached.items()},
        "steps": {"plain": plain["steps"]} | {way: one["steps"] for way, one in reached.items()},
    }


def _of(place: dict[str, Any], hosts: list[int]) -> dict[str, Any]:
    """The place with only these hosts, none of which changes."""
    return {**place, **{key: [place[key][host] for host in hosts] for key in ("speeds", "rates")}, "schedule": []}
