"""The demo's rows: what each of them is told to do, fixed beforehand."""

from __future__ import annotations

from dynamix_lab.opponents.trial import LocalSettings, Trial

SCENARIO, WORKLOAD = "device-demo", "mnist1d-noisy-mlp"
SOURCE = f"dynamix bench opponents --places {SCENARIO}/{WORKLOAD}"
"""What tunes these numbers."""

TRIALS = {
    trial.row: trial
    for trial in (
        Trial("single", None, 256, 0.2),
        Trial("static", "static", 128, 0.283),
        Trial("lb_bsp", "lb_bsp", 64, 0.2),
        Trial("local", None, 32, 0.1, local=LocalSettings(steps=8, momentum="averaged")),
        Trial("dynamix", "dynamix", 64, 0.2, lr_rule="adascale"),
    )
}
"""Row -> what it does, in the order of the tables."""

ABOUT = {
    "single": "the fastest device trains alone, with a batch of its own",
    "static": "plain data parallel training: all devices take equal batches and meet after every step",
    "lb_bsp": "all devices meet after every step; batches follow measured speed, their sum stays what it is",
    "local": "local SGD: each device takes steps in proportion to its speed, then all average their models",
    "dynamix": "all devices meet after every step; the policy sets each device's batch size while training goes on",
    "static-again": "static a second time; how far the two differ is the noise of this measurement",
}
"""Row -> one sentence on what it is."""
