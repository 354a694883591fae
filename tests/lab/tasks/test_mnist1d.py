import random

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix_lab.tasks import as_is, make_workload
from dynamix_lab.tasks.mnist1d import make_data
from tests.refused import refused


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_data.cache_clear()
    yield tmp_path
    make_data.cache_clear()


def test_same_seed_same_data_generated_or_cached_and_another_seed_another(cache):
    generated = make_data(3, train=80, test=20)
    assert list(cache.rglob("*.npz"))
    make_data.cache_clear()
    cached = make_data(3, train=80, test=20)
    assert torch.equal(generated.train.inputs, cached.train.inputs)
    assert torch.equal(generated.test.targets, cached.test.targets)
    assert not torch.equal(cached.train.inputs, make_data(4, train=80, test=20).train.inputs)
    assert generated.train.inputs.shape == (80, 1, 40)
    assert len(generated.test) == 20


def test_generation_leaves_the_callers_random_numbers_alone(cache):
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    make_data(5, train=10, test=10)
    assert (random.random(), np.random.random()) == expected


def test_an_unwritable_cache_is_no_reason_to_fail(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    make_data.cache_clear()
    assert len(make_data(6, train=10, test=10).train) == 10


def test_sizes_that_cannot_be_are_refused():
    refused(ConfigError, "multiple of 10", make_data, 0, train=7, test=2)


def test_batches_reach_the_loop_as_the_sampler_cut_them(cache):
    data = make_workload("mnist1d").make_data(0, train=40, test=10).train
    loader = torch.utils.data.DataLoader(data, batch_sampler=[[3, 1], [5]], collate_fn=as_is)
    inputs, targets = next(iter(loader))
    assert torch.equal(inputs, torch.stack([data[3][0], data[1][0]]))
    assert torch.equal(targets, torch.stack([data[3][1], data[1][1]]))


@pytest.mark.parametrize("damage", ["torn", "text", "empty", "other"])
def test_a_damaged_cache_is_named_with_the_fix(cache, damage):
    make_data(7, train=10, test=10)
    (file,) = cache.rglob("*.npz")
    whole = file.read_bytes()
    if damage == "other":
        np.savez(file, inputs=np.zeros((3, 3)), targets=np.zeros(3))
    else:
        file.write_bytes({"torn": whole[: len(whole) // 2], "text": b"not an archive", "empty": b""}[damage])
    make_data.cache_clear()
    with pytest.raises(ConfigError, match="remove it") as caught:
        make_data(7, train=10, test=10)
    assert str(file) in str(caught.value)
    file.unlink()
    assert len(make_data(7, train=10, test=10).train) == 10


def test_nothing_is_left_of_a_cache_that_could_not_be_written(cache, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(make_data(8, train=10, test=10).train) == 10
    assert not [path for path in cache.rglob("*") if path.is_file()]
