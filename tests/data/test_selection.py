"""An epoch over a subset, or drawn by weight: the same samples whatever the split, the position and the world size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dynamix
from dynamix.errors import ConfigError, DynamixError, StateError, UsageError
from tests.ranks import refusal, run_ranks
from tests.union import Script

DATA = TensorDataset(torch.arange(200))
TRAIN = list(range(3, 200, 2))[:90]  # the rest is held out
WEIGHTS = [0.0, 1.0, 3.0, 4.0] * 50


def _controller(batch_size: int = 6, policy: Any = "static", **options: Any) -> dynamix.Controller:
    return dynamix.Controller(policy, batch_size, **options)


def _seen(loader: Any) -> list[int]:
    return [int(i) for (batch,) in loader for i in batch]


def _kept(sampler: Any) -> list[int]:
    seen = _seen(_controller().loader(DataLoader(DATA, batch_size=6, sampler=sampler)))
    cut = BatchSampler(sampler, 6, drop_last=False)  # which torch's loader makes of a sampler
    assert _seen(_controller().loader(DataLoader(DATA, batch_sampler=cut))) == seen
    return seen


def test_a_subset_random_samplers_subset_is_kept() -> None:
    loader = _controller().loader(DataLoader(DATA, batch_size=6, sampler=SubsetRandomSampler(TRAIN)))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(_seen(loader))
    assert sorted(epochs[0]) == sorted(epochs[1]) == TRAIN
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    assert epochs[1] == torch.tensor(TRAIN)[order].tolist() != epochs[0]


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(90)),
        RandomSampler(range(90)),
        DistributedSampler(TensorDataset(torch.arange(90)), num_replicas=1, rank=0),
    ],
)
def test_a_sampler_made_for_the_first_samples_takes_no_others(sampler: Any) -> None:
    assert sorted(_kept(sampler)) == list(range(90))


def test_a_weighted_samplers_weights_and_number_are_kept() -> None:
    loader = _controller().loader(DataLoader(DATA, batch_size=6, sampler=WeightedRandomSampler(WEIGHTS, 4000)))
    seen = _seen(loader)
    parts = Counter(i % 4 for i in seen)
    assert len(seen) == 4000
    assert parts[0] == 0
    for of, weight in enumerate(WEIGHTS[1:4], 1):
        assert parts[of] == pytest.approx(500 * weight, rel=0.1)
    assert max(Counter(seen).values()) > 20  # with replacement
    loader.set_epoch(1)
    assert _seen(loader) != seen
    drawn = _kept(RandomSampler(DATA, replacement=True, num_samples=400))
    assert len(drawn) == 400
    assert 120 < len(set(drawn)) < 200


def test_weights_of_a_subset() -> None:
    sampler = _controller().batch_sampler(DATA, indices=TRAIN, weights=np.arange(90), num_samples=600)
    seen = Counter(i for batch in sampler for i in batch)
    assert sum(seen.values()) == 600
    assert seen.keys() <= set(TRAIN[1:])
    assert sum(seen[i] for i in TRAIN[45:]) == pytest.approx(450, rel=0.1)


def test_a_subset_in_its_own_order() -> None:
    sampler = _controller().batch_sampler(DATA, indices=torch.tensor([9, 1, 7, 3, 5, 11, 13]), shuffle=False)
    assert [i for batch in sampler for i in batch] == [9, 1, 7, 3, 5, 11, 13]


class _Bucket(Sampler[list[int]]):
    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])


class _Weighted(DistributedSampler[Any]):
    def __iter__(self) -> Any:
        return iter([1, 1, 1])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_sampler=_Bucket()),
        DataLoader(DATA, batch_size=6, sampler=_Weighted(DATA, num_replicas=1, rank=0)),
        DataLoader(DATA, batch_size=6, sampler=WeightedRandomSampler(WEIGHTS, 20, replacement=False)),
        DataLoader(DATA, batch_size=6, sampler=RandomSampler(DATA, num_samples=20)),
        DataLoader(DATA, batch_sampler=BatchSampler(_Bucket(), 6, drop_last=False)),
    ],
)
def test_what_cannot_be_kept_is_refused_with_what_to_write(loader: DataLoader[Any]) -> None:
    with pytest.raises(UsageError, match=r"indices= if .* weights= if .* lengths= and padded=True if"):
        _controller().loader(loader)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weights": [1.0] * 199}, r"shape of weights=\(199,\) .* \(200,\)"),
        ({"weights": [1.0, -2.0] + [1.0] * 198}, r"weights\[1\]=-2.0 .* 0 or more"),
        ({"weights": [float("nan")] * 200}, r"weights\[0\]=nan"),
        ({"weights": [0.0] * 200}, r"sum of weights=0.0"),
        ({"weights": "heavy"}, r"weights='<U5'"),
        ({"weights": WEIGHTS, "shuffle": False}, r"shuffle=False .* weights"),
        ({"weights": WEIGHTS, "num_samples": 0}, r"num_samples=0 .* whole number, 1 or more"),
        ({"num_samples": 50}, r"num_samples=50 .* None without weights"),
        ({"indices": [*TRAIN, 200]}, r"indices\[90\]=200 .* 0 to 199"),
        ({"indices": [-1, *TRAIN]}, r"indices\[0\]=-1"),
        ({"indices": [*TRAIN, 9]}, r"indices=.*9, 9.* each index once; .*weights="),
        ({"indices": [True] * 200}, r"indices='bool \(200,\)'"),
        ({"indices": []}, r"indices="),
        ({"indices": [1, 2, 3]}, r"1 to 3, the samples of an epoch"),
        ({"indices": TRAIN, "weights": WEIGHTS}, r"shape of weights=\(200,\) .* \(90,\)"),
    ],
)
def test_what_is_not_possible_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _controller().batch_sampler(DATA, **given)


def _train(folder: str, rank: int, sizes: list[int], given: dict[str, Any], batches: int) -> Any:
    """Goes on from the folder's state if there is one; its samples, the weights, whether the epoch ended."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    controller = _controller(12 // len(sizes), Script([sizes, sizes[::-1]]), interval=2)
    loader = DataLoader(DATA, batch_sampler=controller.batch_sampler(DATA, seed=4, **given))
    model = controller.wrap(DDP(net) if len(sizes) > 1 else net, optimizer)
    if (path := Path(folder) / "state.pt").exists():
        state = torch.load(path, weights_only=True)
        controller.load_state_dict(state["controller"])
        net.load_state_dict(state["net"])
    seen = []
    for (x,) in loader:
        seen += x.tolist() if controller.batch_sizes[rank] else []
        model(x[:, None] / 200).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        if (batches := batches - 1) == 0:
            break
    state = {"controller": controller.state_dict(gather=True), "net": net.state_dict()}
    done = controller.epoch_done
    controller.close()
    if rank == 0:
        torch.save(state, path)
    return seen, [p.tolist() for p in net.parameters()], done


KINDS: list[dict[str, Any]] = [{"indices": TRAIN}, {"weights": WEIGHTS, "num_samples": 90}]


def _ranked(rank: int, folder: Path, sizes: list[int], batches: int) -> list[Any]:
    return [_train(str(folder / str(i)), rank, sizes, given, batches) for i, given in enumerate(KINDS)]


@pytest.mark.multiproc
def test_ranks_train_on_the_union_and_resume_at_other_world_sizes(tmp_path: Path) -> None:
    for name in ("alone0", "alone1", "0", "1"):
        (tmp_path / name).mkdir()
    phases = [([9, 3], 3), ([2, 7, 3], 2), ([5, 7], -1)]
    of_ranks = [run_ranks(_ranked, len(sizes), tmp_path, sizes, batches) for sizes, batches in phases]
    for i, given in enumerate(KINDS):
        whole, alone, _ = _train(str(tmp_path / f"alone{i}"), 0, [12], given, -1)
        assert Counter(whole) == Counter(sample for ranks in of_ranks for of_rank in ranks for sample in of_rank[i][0])
        assert all(of_rank[i][2] for of_rank in of_ranks[-1]), "the epoch is done"
        for mine, theirs in zip(of_ranks[-1][0][i][1], alone, strict=True):
            assert np.allclose(mine, theirs, rtol=1e-5)  # as one process on the same batches of 12
        if "indices" in given:
            assert sorted(whole) == TRAIN


def test_a_state_of_another_subset_or_other_weights_is_refused() -> None:
    def made(**given: Any) -> dynamix.Controller:
        controller = _controller()
        controller.batch_sampler(DATA, **given)
        return controller

    state = made(indices=TRAIN).state_dict()
    made(indices=np.array(TRAIN)).load_state_dict(state)
    with pytest.raises(StateError, match=r"indices have the checksum .* would train on other samples; pass those"):
        made(indices=range(90)).load_state_dict(state)
    with pytest.raises(StateError, match=r"weights were not given in the checkpoint.*; leave weights out"):
        made(indices=TRAIN, weights=[1.0] * 90).load_state_dict(state)
    with pytest.raises(StateError, match=r"dataset_size=90"):
        made().load_state_dict(state)
    with pytest.raises(StateError, match=r"weights have the checksum"):
        made(weights=[1.0] * 200).load_state_dict(made(weights=WEIGHTS).state_dict())


def _other(rank: int) -> dict[str, str]:
    given = {"indices": [TRAIN, TRAIN[::-1]][rank], "weights": [WEIGHTS, [1.0] * 200][rank]}
    return {
        name: refusal(DynamixError, _train, "/nowhere", rank, [6, 6], {name: value}, 2) for name, value in given.items()
    }


@pytest.mark.multiproc
def test_ranks_that_were_given_other_samples_are_told() -> None:
    for told in run_ranks(_other, 2):
        for name, said in told.items():
            assert f"{name} is " in said
            assert f"batch_sampler(dataset, {name}=...) the same on every rank" in said


def test_weights_of_the_first_samples_draw_from_these() -> None:
    assert set(_kept(WeightedRandomSampler([1.0, 0.0, 2.0] * 20, 120))) <= {i for i in range(60) if i % 3 != 1}
    with pytest.raises(ConfigError, match=r"indices\[200\]=200 is not possible"):
        _kept(WeightedRandomSampler([1.0] * 201, 120))  # torch's loader would ask for a sample that is not there


def test_a_number_of_draws_may_be_numpys() -> None:
    sampler = _controller().batch_sampler(DATA, weights=WEIGHTS, num_samples=np.int64(48))  # type: ignore[arg-type]
    assert type(sampler.state_dict()["dataset_size"]) is int
    assert len(sampler) == 8
