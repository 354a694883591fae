"""Rows that train as the product does: by its own clock from the first round on."""

from __future__ import annotations

import dataclasses

from dynamix.window import Floats
from dynamix_lab.emulator import load_scenario
from dynamix_lab.opponents.buckets import gradient_buckets
from dynamix_lab.opponents.course import ring_mbit
from dynamix_lab.opponents.runs import RunLimits
from dynamix_lab.opponents.shares import FIRST_STEPS
from dynamix_lab.opponents.trial import LocalSettings, Trial
from dynamix_lab.opponents.virtual import INTERVAL, run_virtual
from dynamix_lab.opponents.world import DeviceWorld, LiveExtras
from dynamix_lab.suites.rounds.jobs import FIXED_S, PER_SAMPLE_S, WORKERS, RoundsJob, exchange_s
from dynamix_lab.suites.rounds.train import EVERY, JITTERS, Track


def train_product(job: RoundsJob, ratio: float, rate: float, speeds: Floats, seed: int) -> Track:
    """`lb_bsp` over parameters on the virtual clock, steps by the ratio; first rounds, windows and epochs included.

    The track's seconds are the clock's, meetings included.
    """
    workload = dataclasses.replace(job.load(), make_optimizer=lambda parameters: job.make(parameters, rate))
    model = workload.make_model(0)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    rate_mbit_s = ring_mbit(WORKERS, size) / exchange_s(job, speeds, ratio)
    scenario = load_scenario(
        {
            "name": "rounds",
            "description": "Made for a job, speeds and an exchange.",
            "device": {"fixed_ms": 1000 * FIXED_S, "per_sample_ms": 1000 * PER_SAMPLE_S},
            "hosts": [{"cpu": float(speed), "rate_mbit_s": float(f"{rate_mbit_s:.4g}")} for speed in speeds],
        }
    )
    extras, buckets = LiveExtras(step_s=0.0, stage_s=0.0, jitter_sd=0.0), gradient_buckets(model)
    world = DeviceWorld(scenario, seed=seed, batch_size=job.piece, buckets=buckets, extras=extras, interval=INTERVAL)
    trial = Trial(
        "lb_bsp-parameters", "lb_bsp", job.piece, rate, local=LocalSettings(steps=FIRST_STEPS, period="ratio")
    )
    limits = RunLimits(samples=2 * job.budget, target_loss=job.target, every_samples=job.budget // EVERY)
    run = run_virtual(trial, workload, workload.make_data(seed), world, seed=seed, limits=limits)
    track = Track.empty()
    for score in run.evaluations:
        track.samples.append(score.samples)
        track.loss.append(round(score.loss, 5))
        track.meetings.append(0)
        track.busy_s.append([round(score.time_s, 4)] * len(JITTERS))
        track.bent.append([0.0, 0.0])
    return track
