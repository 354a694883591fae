"""What the model fitted and answered when this was recorded, window by window: its figures stay what they are.

After a change that is meant to fit otherwise, record it anew:
`python -m tests.model.test_as_recorded > tests/model/recorded.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamix.model import JobModel, log_goodput
from dynamix.model.elasticity import LocalElasticity
from dynamix.model.measured import base_total, busy_seconds, step_seconds
from dynamix.window import Bounds
from tests.model.trajectories import CASES, windows

RECORDED = Path(__file__).with_name("recorded.json")


def _of_model(model: JobModel, case: str, t: int) -> dict[str, Any]:
    """What it knows and what it answers, as arrays."""
    shape = CASES[case][0]
    workers = shape[-1]
    high = np.where(np.arange(workers) % 3 == 0, 100, 300)
    bounds = Bounds.of(workers, 0 if t % 2 else 4, high, total_high=min(60 * workers, int(high.sum())))
    others = np.stack(
        [np.full(shape, 30.0), model.sizes, np.full(shape, 140.0), np.arange(model.sizes.size).reshape(shape)]
    )
    costs = model.costs
    return {
        "sizes": [model.best(bounds), model.best(Bounds.of(workers, 1, 4000))],
        "line": [costs.alpha * 1e3, costs.beta * 1e3],
        "tangent": model.log_step(others),
        "full": model.log_step(others, costs="full"),
        "goodput": model.log_goodput(others, costs="full", unknown="base"),
        "unknown ignored": model.log_goodput(others),
        "costs": [costs.variance * 1e4, costs.jitter * 1e4],
        "lasted": costs.lasted,
        "errors": [costs.error * 1e4, costs.apart * 1e4, costs.count],
        "believed": costs.weights[..., ::3],
        "loss": costs.loss.sum((-1, -2)),
        "level": costs.level[..., 4],
        "doubt": np.nan_to_num(costs.before).sum((-1, -2)),
        "exchange": model.exchange.level[..., ::3],
        "overlap": model.exchange.loss[..., ::3],
        "counted": model.exchange.count,
        "noise": [model.noise.level, model.noise.batch],
        "job": [model.stretch, model.largest.total, model.base],
    }


def followed(case: str) -> list[dict[str, Any]]:
    """The figures after every window."""
    model, curve, found = JobModel(), LocalElasticity(), []
    for t, window in enumerate(windows(case)):
        model = model.update(window)
        unit = base_total(window)[..., None] / window.workers
        curve = curve.update(unit, window.batch_size.astype(np.float64), busy_seconds(window))
        excess = curve.excess(unit, *model.line)
        steep, known = curve.around(excess, unit, window.batch_size.astype(np.float64))
        figures = _of_model(model, case, t)
        total = window.batch_size.sum(-1).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            figures["reached"] = log_goodput(
                total, np.log(step_seconds(window)), model.log_waste(total, unknown="base")
            )
        figures["elasticity"] = [steep[..., 0], steep[..., 1], known[..., 0], known[..., 1]]
        figures["warned"] = curve.beyond(excess, unit, window.batch_size, np.full(window.batch_size.shape, 150.0))
        found.append({name: np.asarray(value, dtype=np.float64) for name, value in figures.items()})
    return found


@pytest.mark.parametrize("case", CASES)
def test_figures_are_what_was_recorded(case: str) -> None:
    recorded = json.loads(RECORDED.read_text())[case]
    for t, (before, now) in enumerate(zip(recorded, followed(case), strict=True)):
        assert before.keys() == now.keys()
        for name, values in now.items():
            expected = np.asarray(before[name], dtype=np.float64)
            np.testing.assert_allclose(
                values.reshape(-1), expected, rtol=1e-6, atol=1e-9, err_msg=f"{name}, window {t}"
            )


if __name__ == "__main__":

    def plain(values: np.ndarray) -> list[float | None]:
        return [None if np.isnan(x) else float(f"{x:.8g}") for x in values.reshape(-1)]

    print(json.dumps({case: [{k: plain(v) for k, v in w.items()} for w in followed(case)] for case in CASES}))
