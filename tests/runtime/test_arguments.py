"""Arguments of `Controller` beyond those in test_controller: wrong types are refused, not rounded or passed on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

import dynamix
from dynamix.errors import ConfigError, StateError


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"policy": "nonsense"}, "policy='nonsense' .*dbs, dynamix, dynamix-paper, goodput, lb_bsp"),
        ({"policy": object()}, "decide, state_dict, load_state_dict"),
        ({"policy": 32}, "policy=32 .* a name, or .*; write batch_size=32$"),
        ({"batch_size": 32.0}, "batch_size=32.0 .* a whole number, 1 or more; write batch_size=32$"),
        ({"batch_size": "32"}, "batch_size='32' .* a whole number, 1 or more; give a number, without quotes"),
        ({"batch_size": 0}, "batch_size=0 .* a whole number, 1 or more; give a larger one"),
        ({"batch_size": 128, "max_batch_size": 64}, "batch_size=128 .* 1 to 64"),
        ({"batch_size": 20, "quantum": 8}, "batch_size=20 .* in steps of 8"),
        ({"accumulate": np.int64(2)}, "accumulate=.*2.* a whole number, 1 or more; write accumulate=2$"),
        ({"accumulate": True}, "accumulate=True"),
        ({"interval": 0}, "interval=0 .* a whole number, 1 or more; give a larger one"),
        ({"min_batch_size": 2.5}, "min_batch_size=2.5"),
        ({"min_batch_size": 64, "max_batch_size": 32}, "max_batch_size=32 .* at least min_batch_size=64"),
        ({"max_batch_size": 64.0}, "max_batch_size=64.0 .* one whole number or a list .*; write max_batch_size=64$"),
        ({"max_batch_size": [64, 32]}, "a list of 1, one per rank; match the world size"),
        ({"max_batch_size": [8.5]}, r"max_batch_size=\[8.5\]"),
        ({"max_batch_size": "64"}, "max_batch_size='64'"),
        ({"quantum": 2.0}, "quantum=2.0"),
        ({"max_change": "2"}, "max_change='2' .* a number, more than 1; use 2.0"),
        ({"max_change": 1.0}, "max_change=1.0 .* more than 1"),
        ({"max_global_batch": 1.5}, "max_global_batch=1.5 .* a whole number, 1 or more; write max_global_batch=2"),
        ({"min_global_batch": "a"}, "min_global_batch='a' .* a whole number"),
        ({"min_global_batch": 100}, "min_global_batch=100 .* at most 64, the sum of .* upper bounds; lower it"),
        ({"min_global_batch": 40, "max_global_batch": 32}, "min_global_batch=40 .* at most max_global_batch"),
        ({"lr_rule": "cubic"}, "lr_rule='cubic'.*auto, none, linear, sqrt, adascale"),
        ({"rate_for": 2.5}, "rate_for=2.5"),
        ({"rate_for": -8}, "rate_for=-8"),
        ({"global_batch": "adaptve"}, "did you mean 'adaptive'"),
        ({"meet": "gradient"}, "did you mean 'gradients'"),
        ({"interval": "atuo"}, "did you mean 'auto'"),
    ],
)
def test_a_value_that_is_not_possible_is_named_with_what_is_allowed_and_what_to_write(
    arguments: dict[str, Any], says: str
) -> None:
    given = {"policy": "static", "batch_size": 8, "global_batch": "adaptive", **arguments}
    with pytest.raises(ConfigError, match=says):
        dynamix.Controller(**given)


def test_whole_numbers_of_any_type_are_numbers() -> None:
    sizes: dict[str, Any] = {"min_batch_size": np.int64(4), "max_batch_size": np.array([16])}
    totals: dict[str, Any] = {"min_global_batch": np.int32(4), "max_global_batch": 12.0}
    bounds = dynamix.Controller("static", 8, global_batch="adaptive", **sizes, **totals).bounds
    assert (bounds.low.tolist(), bounds.high.tolist()) == ([4], [16])
    assert (int(bounds.total_low), int(bounds.total_high)) == (4, 12)


def test_a_misspelt_argument_is_answered_by_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Controller\(\) got an unexpected keyword argument 'intervall': did you mean"):
        dynamix.Controller("goodput", 8, intervall=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"argument='batchsize'.*did you mean 'batch_size'"):
        dynamix.Settings("goodput", batchsize=5)


def test_no_batch_size_is_said() -> None:
    says = r"begins with 128 samples\. Write Controller\(batch_size=\.\.\.\)"
    with pytest.warns(RuntimeWarning, match=says) as warned:
        assert dynamix.Controller("goodput").batch_sizes.tolist() == [128]
    assert warned[0].filename == __file__


@pytest.mark.parametrize("policy", ["lb_bsp", "dbs"])
@pytest.mark.parametrize("options", [{}, {"interval": 2, "max_batch_size": 64}])
def test_a_policy_that_moves_shares_only_says_that_it_does_not_adapt(policy: str, options: dict[str, Any]) -> None:
    says = rf"the policy {policy} only moves shares, .*goodput, dynamix or stigmergic"
    with pytest.warns(RuntimeWarning, match=says) as warned:
        dynamix.Controller(policy, 8, global_batch="adaptive", **options)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("goodput", {}),
        ("dynamix", {}),
        ("guarded:lb_bsp", {}),  # under a guard the goodput rule may take over
        ("lb_bsp", {"guard": True}),
        ("lb_bsp", {"meet": "parameters", "micro_batch": 4}),  # the number of pieces moves
        ("static", {}),  # DYNAMIX_POLICY=static turns all off, without an edit
    ],
)
def test_what_may_adapt_is_not_warned_of(policy: str, options: dict[str, Any]) -> None:
    dynamix.Controller(policy, 8, global_batch="adaptive", **options)


class _Endless(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("dataset", "fix"),
    [
        (DataLoader(range(64), batch_size=8), "write controller.loader(loader)"),  # type: ignore[arg-type]
        (SubsetRandomSampler(range(32, 64)), "give the data set itself; indices= and weights= say which"),
        (_Endless(), "write controller.stream(dataset"),
        (64, "write controller.stream(dataset"),
    ],
)
def test_what_is_no_data_set_is_named(dataset: Any, fix: str) -> None:
    controller = dynamix.Controller("static", 8)
    with pytest.raises(ConfigError, match=r"dataset='\w+' is not possible: allowed is a data set with len") as error:
        controller.batch_sampler(dataset)
    assert fix in str(error.value)
    controller.batch_sampler(range(64))


def test_what_has_the_length_of_its_data_set_does_no_harm() -> None:
    whole: Any = range(64)
    for dataset in (DataLoader(whole, batch_size=None), RandomSampler(whole)):
        assert len(dynamix.Controller("static", 8).batch_sampler(dataset)) == 8
    in_order: Any = {"seed": None, "shuffle": False}
    assert next(iter(dynamix.Controller("static", 8).batch_sampler(whole, **in_order))) == [*range(8)]


@pytest.mark.parametrize("seed", [None, "a", 1.0])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    controller = dynamix.Controller("static", 8)
    with pytest.raises(ConfigError, match=r"seed=.* is not possible: allowed is a whole number"):
        controller.batch_sampler(range(64), seed=seed)


def test_a_seed_of_numpy_is_a_number() -> None:
    orders = []
    for seed in (3, np.int64(3), torch.tensor(3)):
        sampler = dynamix.Controller("static", 8).batch_sampler(range(64), seed=seed)  # type: ignore[arg-type]
        orders.append([*sampler])
        assert type(sampler.state_dict()["seed"]) is int
    assert orders[0] == orders[1] == orders[2]


def test_a_folder_is_no_events_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed is a file; name one in this folder, such as .*/events\.jsonl"):
        dynamix.Controller("static", 8, events=tmp_path)


def test_a_state_that_is_a_whole_checkpoint_is_named() -> None:
    controller = dynamix.Controller("static", 8)
    state = {"net": {}, "controller": controller.state_dict()}
    with pytest.raises(StateError, match=r"keys are \['net', 'controller'\]. Write .*\(state\['controller'\]\)"):
        controller.load_state_dict(state)
    with pytest.raises(StateError, match=r"keys are \[\]. Load a state that controller"):
        controller.load_state_dict({})
