"""Data of workloads: cached numbers, source text and ratings."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix_lab.tasks import make_workload, mnist1d, pysource, ratings
from dynamix_lab.tasks.pysource import CONTEXT, IGNORE, cut, source_files
from tests.refused import refused


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mnist1d.make_data.cache_clear()
    yield tmp_path
    mnist1d.make_data.cache_clear()


def test_same_seed_same_data_generated_or_cached_and_another_seed_another(cache):
    generated = mnist1d.make_data(3, train=80, test=20)
    assert list(cache.rglob("*.npz"))
    mnist1d.make_data.cache_clear()
    cached = mnist1d.make_data(3, train=80, test=20)
    assert torch.equal(generated.train.inputs, cached.train.inputs)
    assert torch.equal(generated.test.targets, cached.test.targets)
    assert not torch.equal(cached.train.inputs, mnist1d.make_data(4, train=80, test=20).train.inputs)
    assert generated.train.inputs.shape == (80, 1, 40)
    assert len(generated.test) == 20


def test_generation_leaves_the_callers_random_numbers_alone(cache):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    mnist1d.make_data(5, train=10, test=10)
    assert (random.random(), np.random.random()) == expected


def test_an_unwritable_cache_is_no_reason_to_fail(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    mnist1d.make_data.cache_clear()
    assert len(mnist1d.make_data(6, train=10, test=10).train) == 10
    refused(ConfigError, "multiple of 10", mnist1d.make_data, 0, train=7, test=2)


@pytest.mark.parametrize("damage", ["torn", "other"])
def test_a_damaged_cache_is_named_with_the_fix(cache, damage):
    mnist1d.make_data(7, train=10, test=10)
    (file,) = cache.rglob("*.npz")
    whole = file.read_bytes()
    if damage == "other":
        np.savez(file, inputs=np.zeros((3, 3)), targets=np.zeros(3))
    else:
        file.write_bytes(whole[: len(whole) // 2])
    mnist1d.make_data.cache_clear()
    with pytest.raises(ConfigError, match="remove it") as caught:
        mnist1d.make_data(7, train=10, test=10)
    assert str(file) in str(caught.value)
    file.unlink()
    assert len(mnist1d.make_data(7, train=10, test=10).train) == 10


def texts(arrays) -> list[bytes]:
    """The samples as they were cut, from inputs and targets."""
    found = []
    for row, target in zip(arrays.inputs, arrays.targets, strict=True):
        length = int((target != IGNORE).sum())
        assert (target[length:] == IGNORE).all()
        assert torch.equal(row[1:length], target[: length - 1])
        found.append(bytes([int(row[0]), *target[:length].tolist()]))
    return found


def test_samples_are_whole_lines_of_the_interpreters_own_library() -> None:
    data = pysource.make_data(0, train=300, test=50)
    library = {path.name: path.read_bytes() for path in source_files()}
    assert "argparse.py" in library
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in source_files())
    sample = texts(data.train)[0]
    assert any(sample in text for text in library.values())
    lengths = {len(text) for text in texts(data.train)}
    assert len(lengths) > 10, "samples differ in length, which is why they are weighted by bytes"
    assert max(lengths) <= CONTEXT + 1


def test_no_file_is_in_both_train_and_test(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_text("".join(f"name_{i:02} = {j:03}\n" for j in range(60)))
    data = pysource.make_data(0, train=50, test=30, folder=tmp_path)
    files = [{text[5:7] for text in texts(part)} for part in (data.train, data.test)]
    assert all(files)
    assert not files[0] & files[1]


def test_cutting_keeps_every_byte_but_lonely_ones() -> None:
    text = b"short\n" + b"x" * 50 + b"\n\n" + b"a = 1\n" * 5
    assert b"".join(cut(text, longest=16)) == text
    assert all(2 <= len(piece) <= 16 for piece in cut(text, longest=16))
    assert cut(b"") == []


def test_an_empty_folder_and_too_little_source_are_said(tmp_path: Path) -> None:
    refused(ConfigError, "standard library", pysource.make_data, 0, train=10, test=10, folder=tmp_path)
    (tmp_path / "one.py").write_text("a = 1\n" * 10)
    refused(ConfigError, "at most about", pysource.make_data, 0, train=10, test=10, folder=tmp_path)


@pytest.mark.parametrize("name", ["pysource", "pysource-lstm"])
def test_no_byte_sees_those_after_it(name: str) -> None:
    model = make_workload(name).make_model(0).eval()
    inputs = torch.randint(256, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    changed = inputs.clone()
    changed[:, 60:] = 7
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :, :60], after[:, :, :60])
    assert not torch.allclose(before[:, :, 60:], after[:, :, 60:])


def test_pairs_are_rated_once_and_few_items_get_most_ratings() -> None:
    data = ratings.make_data(0, train=20_000, test=2_000)
    pairs = torch.cat([data.train.inputs, data.test.inputs])
    assert len(torch.unique(pairs, dim=0)) == 22_000
    of_item = np.sort(np.bincount(pairs[:, 1].numpy()))[::-1]
    assert of_item[:80].sum() > 0.25 * of_item.sum(), "a tenth of the items has more than a quarter of the ratings"


def test_sparse_and_dense_gradients_are_the_same_step() -> None:
    data = ratings.make_data(0, train=2_000, test=100)
    models = []
    for name in ("ratings", "ratings-dense"):
        workload = make_workload(name)
        model = workload.make_model(0)
        optimizer = workload.make_optimizer(model.parameters())
        for step in range(3):
            inputs, targets = data.train.__getitems__(range(64 * step, 64 * step + 64))
            workload.loss(model(inputs), targets).backward()
            assert model.users.weight.grad.is_sparse == (name == "ratings")
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for sparse, dense in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(sparse, dense)
