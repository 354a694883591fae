"""What holds for every workload that needs no files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from dynamix.errors import ConfigError
from dynamix_lab.tasks import Arrays, Data, Workload, held_out_loss, make_workload, score, workload_names
from tests.refused import refused

# samples, steps, batch and the score to be passed. Knowing nothing gives 0.1 of the classes and 0 of the ratings'
# variance; always saying "space" gives 0.28 of the bytes.
LEARNS: dict[str, tuple[int, int, int, float]] = {
    "mnist1d": (1000, 60, 64, 0.2),
    "mnist1d-noisy-mlp": (2000, 150, 128, 0.22),
    "teacher": (20_000, 100, 256, 0.5),
    "teacher-classes": (20_000, 100, 256, 0.25),
    "digits": (600, 60, 64, 0.8),
    "digits-mlp": (600, 100, 64, 0.8),
    "pysource": (600, 60, 24, 0.3),
    "pysource-lstm": (600, 30, 24, 0.33),
    "pysource-pieces": (8000, 200, 64, 0.22),  # the text is that of the interpreter's own library
    "pysource-windows": (8000, 150, 64, 0.25),
    "pysource-windows-lstm": (8000, 120, 64, 0.3),
    "pulse": (8000, 60, 64, 0.3),
    "pulse-2d": (8000, 150, 64, 0.2),
    "ratings": (40_000, 200, 512, 0.2),
    "ratings-dense": (40_000, 200, 512, 0.2),
}


def small(workload: Workload, samples: int = 200) -> Data:
    return workload.make_data(3, train=samples, test=200)


def train(workload: Workload, data: Data, *, steps: int, batch: int) -> Any:
    model = workload.make_model(0)
    optimizer = workload.make_optimizer(model.parameters())
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data.train), (batch,), generator=order).tolist()
        inputs, targets = data.train.__getitems__(rows)
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", workload_names())
def test_one_seed_gives_one_model_and_one_set_of_data_and_leaves_random_numbers_alone(name: str) -> None:
    workload = make_workload(name)
    assert workload.name == name
    assert workload.description
    assert 1 <= workload.min_batch <= workload.base_batch
    before = torch.random.get_rng_state()
    first, again, other = (parameters_to_vector(workload.make_model(s).parameters()) for s in (1, 1, 2))
    data, same = small(workload), small(make_workload(name))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(data.train.inputs, same.train.inputs)
    assert torch.equal(data.test.targets, same.test.targets)
    assert not torch.equal(data.train.inputs, workload.make_data(4, train=200, test=200).train.inputs)


@pytest.mark.parametrize("name", workload_names())
def test_a_batch_passes_and_its_loss_is_a_mean_over_its_divisor(name: str) -> None:
    """Means of two parts, weighted by their divisors, are the mean of both: so unequal shares can be put together.

    In eval mode, for batch norm's sake: in training its statistics are those of a part.
    """
    workload = make_workload(name)
    data = small(workload)
    assert (len(data.train), len(data.test)) == (200, 200)
    model = workload.make_model(0).eval()
    inputs, targets = data.train.__getitems__(range(24))
    with torch.no_grad():
        whole = workload.loss(model(inputs), targets)
        parts = [
            (workload.divisor(y), workload.loss(model(x), y))
            for x, y in zip(inputs.split(18), targets.split(18), strict=True)
        ]
    assert workload.divisor(targets) == sum(n for n, _ in parts)
    union = sum(n * float(loss) for n, loss in parts) / workload.divisor(targets)
    assert union == pytest.approx(float(whole), rel=1e-4)
    assert 0 <= score(workload, model.train(), data.test) <= 1
    assert model.training


@pytest.mark.parametrize("name", LEARNS)
def test_a_few_steps_teach_something(name: str) -> None:
    workload, (samples, steps, batch, passed) = make_workload(name), LEARNS[name]
    data = small(workload, samples)
    assert score(workload, workload.make_model(0), data.test) < passed
    assert score(workload, train(workload, data, steps=steps, batch=batch), data.test) > passed


@pytest.mark.parametrize("name", ["teacher", "pysource-pieces"])
def test_held_out_loss_is_the_loss_of_all_samples_however_they_are_cut(name: str) -> None:
    workload = make_workload(name)
    data, model = small(workload).test, workload.make_model(0)
    with torch.no_grad():
        whole = float(workload.loss(model(data.inputs), data.targets))
    assert held_out_loss(workload, model.train(), data, rows=33) == pytest.approx(whole, rel=1e-4)
    assert model.training


@pytest.mark.parametrize("name", ["teacher", "teacher-classes", "mnist1d-noisy-mlp"])
def test_labels_to_train_on_are_noisy_and_labels_to_test_on_are_not(name: str) -> None:
    noisy = small(make_workload(name), 1000)
    clean = small(make_workload(name, noise=0), 1000)
    assert torch.equal(noisy.train.inputs, clean.train.inputs)
    assert torch.equal(noisy.test.targets, clean.test.targets)
    changed = float((noisy.train.targets != clean.train.targets).float().mean())
    assert changed > 0.4
    refused(ConfigError, "noise", make_workload, name, noise=-0.1)


def test_pieces_cost_as_many_units_as_they_have_bytes_and_a_batch_is_cut_to_its_longest() -> None:
    workload = make_workload("pysource-pieces")
    data = small(workload, 1000)
    assert workload.costs is not None
    costs = workload.costs(data.train)
    assert costs.std() / costs.mean() > 0.5
    inputs, targets = data.train.__getitems__(range(5))
    assert inputs.shape == targets.shape == (5, int(costs[:5].max()))
    assert costs[:5].tolist() == workload.costs(Arrays(inputs, targets)).tolist()


@pytest.mark.parametrize(("name", "least"), [("pulse", 0.9), ("pulse-2d", 1.4), ("pysource-windows", 0.4)])
def test_what_is_to_be_predicted_in_training_is_noisy_and_what_is_held_out_is_not(name: str, least: float) -> None:
    data = small(make_workload(name), 1000)
    if name == "pysource-windows":  # the byte to predict is the next one that is read
        wrong = [(part.targets[:, :-1] != part.inputs[:, 1:]).float().mean() for part in (data.train, data.test)]
        assert torch.equal(data.test.inputs, make_workload(name).make_data(4, train=200, test=200).test.inputs)
    else:
        wrong = [(part.targets.std() ** 2 - 1).clamp(0).sqrt() for part in (data.train, data.test)]
    assert wrong[0] > least
    assert wrong[1] < 0.3


@pytest.mark.parametrize("name", ["digits", "pysource-pieces", "ratings"])
def test_more_samples_than_there_are_is_said(name: str) -> None:
    refused(ConfigError, "at most", make_workload(name).make_data, 0, train=50_000_000, test=10)
    refused(ConfigError, "1 or more", make_workload(name).make_data, 0, train=0, test=10)


def test_unknown_names_and_options_list_what_there_is() -> None:
    refused(ConfigError, ".*".join(workload_names()), make_workload, "mnist2d")
    refused(ConfigError, r"widht.*noise, width", make_workload, "teacher", widht=8)
    refused(ConfigError, "none", make_workload, "digits", folder="x")
    assert make_workload("mnist1d").fixed_target() == 0.947
    refused(ConfigError, "digits", make_workload("digits").fixed_target)
