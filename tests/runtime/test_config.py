"""`JobConfig`: what is refused, what follows from the arguments, what ranks compare; and `Limits`."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.policies import make_policy
from dynamix.policies.guard import Guard
from dynamix.runtime.config import JobConfig
from dynamix.runtime.limits import Limits, fixed_at
from dynamix.runtime.ranks.compare import plain
from tests.ranks import refusal, run_ranks
from tests.refused import refused

ADAPTIVE: dict[str, Any] = {"global_batch": "adaptive"}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"accumulate": 2, "micro_batch": 4}, "accumulate=2 .* is 1 together with micro_batch; leave accumulate out"),
        (
            {"meet": "parameters", "accumulate": 2},
            "accumulate=2 .* 1 with meet='parameters'; .* micro_batch= to the samples",
        ),
        ({"meet": "auto", "accumulate": 2}, "accumulate=2 .* 1 with meet='auto'; leave accumulate out: every batch"),
        ({"meet": "auto", "micro_batch": 4}, "micro_batch=4 .* None with meet='auto'; leave micro_batch out"),
        ({"meet": "parameters", **ADAPTIVE}, "micro_batch=None .* 1 or more with .* global_batch='adaptive'"),
        ({"limits": Limits(max_global_batch=64)}, "max_global_batch=64 .* None with global_batch='fixed'.*leave max_"),
        ({"limits": Limits(quantum=3)}, "batch_size=32 .* 3 to 255 in steps of 3 on rank 0; change batch_size or the"),
        ({"limits": Limits(min_batch_size=[1, 40])}, "batch_size=32 .* 40 to 256 on rank 1"),
        ({"interval": "auto", "policy": "stigmergic"}, "interval='auto' .* decides in one place, .* such as goodput"),
        (
            {"policy": "stigmergic", "meet": "auto"},
            "meet='auto' .* 'gradients' or 'parameters' with this policy; take",
        ),
        (
            {"policy": "stigmergic", "meet": "parameters", "micro_batch": 4, **ADAPTIVE},
            "global_batch='adaptive' .* and this policy; say global_batch='fixed', or take a policy that decides",
        ),
        ({"policy": "pollux"}, "global_batch='fixed' .* 'adaptive' with 'pollux', .* or take lb_bsp or goodput"),
        ({"guard": "yes"}, "guard='yes' .* True, False, None; leave it out: learned policies get one"),
    ],
)
def test_what_cannot_be_is_refused_as_a_whole(told: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        JobConfig(2, **{"policy": "lb_bsp", "batch_size": 32, **told})


# ---------------------------------------------------------------- what follows


def test_a_policy_under_a_guard_gets_no_other() -> None:
    assert isinstance(JobConfig(2, "lb_bsp", 32, guard=True).served, Guard)
    own = make_policy("guarded:lb_bsp")
    assert JobConfig(2, own, 32, guard=True).served is own  # a watch over a watch would see nothing new


def test_a_window_leaves_a_round_for_its_answer_unless_it_is_an_epoch() -> None:
    assert (JobConfig(2, "lb_bsp", 32).slack, JobConfig(2, "dbs", 32).slack) == (1, 0)


SIZES = st.integers(1, 256)
WORLDS = st.integers(1, 5).flatmap(
    lambda workers: st.fixed_dictionaries(
        {
            "workers": st.just(workers),
            "batch_size": SIZES,
            "global_batch": st.sampled_from(["fixed", "adaptive"]),
            "accumulate": st.integers(1, 4),
            "micro_batch": st.none() | SIZES,
            "meet": st.sampled_from(["gradients", "parameters", "auto"]),
            "limits": st.builds(
                Limits,
                min_batch_size=st.none() | SIZES | st.lists(SIZES, min_size=workers, max_size=workers),
                max_batch_size=st.none() | SIZES | st.lists(SIZES, min_size=workers, max_size=workers),
                quantum=st.integers(1, 8),
                min_global_batch=st.none() | SIZES,
                max_global_batch=st.none() | st.integers(256, 2048),
            ),
        }
    )
)


@given(told=WORLDS)
def test_a_job_begins_within_its_bounds_or_is_refused(told: dict[str, Any]) -> None:
    try:
        config = JobConfig(policy="goodput", **told)
    except ConfigError:
        return
    bounds, start = config.bounds, config.start
    assert start.dtype == np.int64
    assert start.shape == bounds.low.shape == (config.workers,)
    assert (bounds.low <= start).all()
    assert (start <= bounds.high).all()
    assert not (start % bounds.quantum).any()
    assert not bounds.quantum % config.accumulate
    assert bounds.low.sum() <= bounds.total_high
    assert bounds.total_low <= bounds.high.sum()
    if config.fixed:
        assert int(bounds.total_low) == int(bounds.total_high) == config.base_batch == int(start.sum())
        assert int(fixed_at(bounds, config.base_batch).total_high) == config.base_batch
    # What a job is told in other words is the same job.
    low, high = bounds.low // config.accumulate, bounds.high // config.accumulate
    limits = Limits(low.tolist(), high.tolist(), quantum=bounds.quantum // config.accumulate)
    if not config.fixed:
        limits = dataclasses.replace(
            limits, min_global_batch=int(bounds.total_low), max_global_batch=int(bounds.total_high)
        )
    again = dataclasses.replace(config, limits=limits)
    assert (again.start == start).all()
    assert str(again.bounds) == str(bounds)


# ---------------------------------------------------------------- what ranks compare


def test_ranks_compare_what_they_were_given_and_what_follows_as_plain_values() -> None:
    def told(**other: Any) -> dict[str, str]:
        given = {"policy": "lb_bsp", "batch_size": 32, **other}
        return {name: json.dumps(value, default=plain) for name, value in JobConfig(2, **given).facts.items()}

    usual = told()
    assert {"policy", "batch_size", "interval", "max_batch_size", "shape of the policy's state"} <= usual.keys()
    for other in (
        {"interval": 10},
        {"accumulate": 2},
        {"lr_rule": "none"},
        {"rate_for": 8},
        {"guard": False},
        {"meet": "auto"},
    ):
        assert {name for name in other if told(**other)[name] != usual[name]} == other.keys()
    assert told(limits=Limits(max_batch_size=[64, 32]))["max_batch_size"] == "[64, 32]"
    assert told(limits=Limits(max_batch_size=[256, 256])) == usual  # in other words the same
    assert told(policy=make_policy("lb_bsp"))["policy"] == '"LBBSP"'


# ---------------------------------------------------------------- limits

NAMED: dict[str, Any] = {
    "min_batch_size": 8,
    "max_batch_size": 64,
    "min_global_batch": 16,
    "max_global_batch": 48,
    "quantum": 8,
    "max_change": 2.0,
}


def test_limits_say_what_the_names_say() -> None:
    by_name = dynamix.Controller("goodput", 32, **ADAPTIVE, **NAMED)
    at_once = dynamix.Controller("goodput", 32, **ADAPTIVE, limits=dynamix.Limits(**NAMED))
    assert str(by_name.bounds) == str(at_once.bounds)
    some = {name: NAMED[name] for name in ("quantum", "max_change")}
    others = {name: value for name, value in NAMED.items() if name not in some}
    mixed = dynamix.Controller("goodput", 32, **ADAPTIVE, **some, limits=Limits(**others))
    assert str(mixed.bounds) == str(by_name.bounds)


def test_what_limits_say_is_not_said_again_by_name() -> None:
    for name, value in NAMED.items():
        says = f"{name}=.*, which limits= says already; leave {name} out"
        given = {**ADAPTIVE, name: value, "limits": Limits(**{name: value})}
        refused(ConfigError, says, dynamix.Controller, "goodput", 32, **given)
    says = r"allowed is a dynamix\.Limits; write limits=dynamix\.Limits\("
    refused(ConfigError, says, dynamix.Controller, "goodput", 32, limits={"max_batch_size": 64})


def test_limits_are_values() -> None:
    of_numpy: Any = {"min_batch_size": np.int64(4), "max_batch_size": np.array([64, 32]), "max_global_batch": 80.0}
    limits = Limits(**of_numpy)
    assert limits == Limits(4, [64, 32], max_global_batch=80) == pickle.loads(pickle.dumps(limits))
    assert limits != Limits(4, [64, 33], max_global_batch=80)
    assert Limits(max_batch_size=torch.tensor([8, 16])) == Limits(max_batch_size=[8, 16])  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.quantum = 8  # type: ignore[misc]


def test_settings_keep_limits_for_later() -> None:
    settings = pickle.loads(pickle.dumps(dynamix.Settings("static", limits=Limits(max_batch_size=16))))
    controller = settings.bind(batch_size=8)
    assert controller.bounds.high.tolist() == [16]


def _refused(rank: int) -> list[str]:
    """What ranks are told that give other limits than one another, and where one of them gives some twice."""
    unlike: dict[str, Any] = {"limits": Limits(max_batch_size=16 if rank == 0 else 32)}
    twice: dict[str, Any] = {"quantum": 1 if rank == 0 else 2, "limits": Limits(quantum=2 if rank else 1)}
    return [refusal(UsageError, dynamix.Controller, "goodput", 8, **given) for given in (unlike, twice)]


@pytest.mark.multiproc
@pytest.mark.timeout(120)
def test_limits_that_differ_between_ranks_are_named_on_all() -> None:
    for unlike, twice in run_ranks(_refused, 2):
        assert "max_batch_size is [16, 16] on rank 0, [32, 32] on rank 1" in unlike
        assert twice.startswith("on rank 1: quantum=2 is not possible: allowed is 2, which limits= says already")
