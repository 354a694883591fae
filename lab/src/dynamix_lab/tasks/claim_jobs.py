"""Jobs for claims: their step-count curve still falls at batches with which several devices work efficiently.

They were chosen by the curve, before any policy was run on them, and frozen: a hash covers data, model and target.
docs/design/jobs.md says how they were chosen, and which were rejected.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamix.errors import ConfigError
from dynamix_lab.tasks import Arrays, Workload, make_workload

_PROBE_SEED, _PROBE_SAMPLES = 9001, (600, 100)


@dataclass(frozen=True, slots=True)
class ClaimJob:
    """A workload, its target, and its measurements on the tuning seeds.

    rates           best learning rate by global batch
    steps           to the target at that rate, by global batch: mean over the tuning seeds
    critical_batch  of the fit steps = s (1 + critical / B)
    sha256          of `definition`
    """

    workload: str
    target: float
    rates: Mapping[int, float]
    steps: Mapping[int, float]
    critical_batch: float
    sha256: str

    def rate_at(self, batch: int) -> float:
        """The best learning rate at the nearest measured global batch, by ratio."""
        return self.rates[min(self.rates, key=lambda known: abs(np.log(known / batch)))]

    def load(self) -> Workload:
        """The workload. Raises `ConfigError` if its definition is not the frozen one."""
        workload = make_workload(self.workload)
        found = definition_sha256(workload)
        if found != self.sha256:
            raise ConfigError("job", f"{self.workload} with sha256 {found}", self.sha256, "freeze a new job instead")
        return workload


def definition_sha256(workload: Workload) -> str:
    """The hash of `definition` as JSON."""
    return hashlib.sha256(json.dumps(definition(workload), sort_keys=True).encode()).hexdigest()


def definition(workload: Workload) -> dict[str, Any]:
    """The definition of data, model and target, as plain values. It takes some ms, or seconds if data are generated.

    For the data it has figures of a small set of one seed, rounded so that another machine's last digits do not matter.
    For a workload with `costs` it has only the costs, because the text is the interpreter's.
    """
    train, test = _PROBE_SAMPLES
    data, model = workload.make_data(_PROBE_SEED, train=train, test=test), workload.make_model(_PROBE_SEED)
    optimizer = workload.make_optimizer(model.parameters())
    plain = {key: value for key, value in optimizer.defaults.items() if isinstance(value, (int, float))}
    return {
        "name": workload.name,
        "description": workload.description,
        "target": workload.target,
        "batches": [workload.min_batch, workload.base_batch, workload.max_batch],
        "model": [repr(model), {name: _figures(p) for name, p in model.named_parameters()}],
        "optimizer": [type(optimizer).__name__, plain],
        "samples": [inspect.signature(workload.make_data).parameters[name].default for name in ("train", "test")],
        "train": _data_figures(workload, data.train),
        "test": _data_figures(workload, data.test),
    }


def _data_figures(workload: Workload, data: Arrays) -> list[Any]:
    if workload.costs is not None:
        return [len(data), _figures(torch.from_numpy(workload.costs(data)))]
    return [len(data), _figures(data.inputs), _figures(data.targets)]


def _figures(values: Tensor) -> list[Any]:
    plain = values.detach().double()
    return [list(plain.shape), *(round(float(v), 4) for v in (plain.mean(), plain.std(correction=0)))]


_FROZEN = (
    ClaimJob(
        workload="teacher",
        target=0.824,
        rates={32: 0.003125, 64: 0.0125, 128: 0.025, 256: 0.05, 512: 0.1, 1024: 0.1},
        steps={32: 1722.5, 64: 858, 128: 327, 256: 186, 512: 119, 1024: 71.5},
        critical_batch=2079,
        sha256="dda0117000d827ed4dd77def81db6ab9db53efb14f06751953e86c0d19434dad",
    ),
    ClaimJob(
        workload="teacher-classes",
        target=0.56,
        rates={32: 0.0125, 64: 0.025, 128: 0.05, 256: 0.1, 512: 0.2, 1024: 0.4},
        steps={32: 2267, 64: 1171, 128: 526.5, 256: 267, 512: 147.5, 1024: 85.5},
        critical_batch=4297,
        sha256="57e3b850258c07b9e7eb46d8b2ed95e37b0b7578a38df25a71ee4f7d4843ffbb",
    ),
    ClaimJob(
        workload="mnist1d-noisy-mlp",
        target=0.54,
        rates={32: 0.025, 64: 0.05, 128: 0.1, 256: 0.2, 512: 0.4, 1024: 0.4},
        steps={32: 2108, 64: 981, 128: 531.5, 256: 278, 512: 155.5, 1024: 115},
        critical_batch=1307,
        sha256="8e483fa87aedc499bfd5da5cb76063a34fd707f2bb9b8d96f857d405cf0ec8cb",
    ),
)
CLAIM_JOBS = {job.workload: job for job in _FROZEN}
"""Jobs by workload. Their figures are those of results/stepcount-*."""
