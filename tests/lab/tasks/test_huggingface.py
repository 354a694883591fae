"""Against a small object with the library's interface, and against the library itself where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynamix.errors import ConfigError
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.huggingface import workload
from tests.refused import refused


class InMemory:
    """The four things that are used of `datasets.Dataset`."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def select(self, indices: list[int]) -> InMemory:
        return InMemory({name: [values[i] for i in indices] for name, values in self.columns.items()})


def columns(n: int, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 4))
    return {
        "features": features.tolist(),
        "kind": (features[:, 0] > 0).astype(int).tolist(),
        "text": [f"row {i} of them" for i in range(n)],
        "pixels": [np.full((8, 8), i % 256, dtype=np.uint8) for i in range(n)],
    }


def in_memory(rows: dict[str, list[Any]]) -> Any:
    return InMemory(rows)


def of_the_library(rows: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(
        {name: rows[name] for name in ("features", "kind", "text")}
    )


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


@pytest.mark.parametrize("make", [in_memory, of_the_library])
def test_two_columns_become_inputs_and_targets_by_seed(make: Any) -> None:
    made = make_workload("huggingface", dataset=make(columns(50)), make_model=linear, inputs="features", targets="kind")
    data = made.make_data(0, train=20, test=10)
    assert data.train.inputs.shape == (20, 4)
    assert data.train.inputs.dtype == torch.float32
    assert data.test.targets.dtype == torch.int64
    assert torch.equal(data.train.inputs, made.make_data(0, train=20, test=10).train.inputs)
    assert not torch.equal(data.train.inputs, made.make_data(1, train=20, test=10).train.inputs)
    rows = {tuple(row) for row in data.train.inputs.tolist()}
    assert not rows & {tuple(row) for row in data.test.inputs.tolist()}, "one split is cut, not used twice"
    model = made.make_model(0)
    optimizer = made.make_optimizer(model.parameters())
    before = made.loss(model(data.train.inputs), data.train.targets).item()
    for _ in range(20):
        made.loss(model(data.train.inputs), data.train.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert made.loss(model(data.train.inputs), data.train.targets).item() < before


def test_splits_are_used_as_they_are_named() -> None:
    splits = {"train": InMemory(columns(30)), "validation": InMemory(columns(12, seed=1))}
    made = workload(splits, make_model=linear, inputs="features", targets="kind", test_split="validation")
    data = made.make_data(0)
    assert (len(data.train), len(data.test)) == (30, 12)
    refused(ConfigError, "train, validation", workload(splits, make_model=linear, train_split="trian").make_data, 0)


def test_text_takes_an_encoder_and_pixels_none() -> None:
    def tokens(values: Any) -> torch.Tensor:
        return torch.stack([torch.tensor(list(value.encode().ljust(20)[:20])) for value in values])

    table = InMemory(columns(20))
    text = workload(table, make_model=linear, inputs="text", targets="kind", encode_inputs=tokens).make_data(0)
    assert text.train.inputs.shape == (16, 20)
    pixels = workload(table, make_model=linear, inputs="pixels", targets="kind").make_data(0)
    assert pixels.train.inputs.dtype == torch.uint8
    refused(ConfigError, "tokenizer", workload(table, make_model=linear, inputs="text", targets="kind").make_data, 0)


def test_wrong_columns_sizes_and_objects_are_said() -> None:
    table = InMemory({**columns(10), "ragged": [[0] * (i + 1) for i in range(10)]})
    refused(ConfigError, "features, kind, text", workload(table, make_model=linear, inputs="image").make_data, 0)
    refused(ConfigError, "one shape", workload(table, make_model=linear, inputs="ragged", targets="kind").make_data, 0)
    with pytest.raises(ConfigError, match="1 to 8"):
        workload(table, make_model=linear, inputs="features", targets="kind").make_data(0, train=9, test=2)
    refused(ConfigError, "iterable", workload(iter([1]), make_model=linear).make_data, 0)


def test_a_name_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(ConfigError, r"\./lab\[huggingface\]", workload, "imdb", make_model=linear)


def test_a_saved_folder_is_opened(tmp_path: Path) -> None:
    of_the_library(columns(20)).save_to_disk(str(tmp_path / "saved"))
    made = workload(str(tmp_path / "saved"), make_model=linear, inputs="features", targets="kind")
    assert len(made.make_data(0, test=5).train) == 15
    (tmp_path / "other").mkdir()
    refused(ConfigError, "save_to_disk", workload, str(tmp_path / "other"), make_model=linear)
