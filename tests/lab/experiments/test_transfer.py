"""Short trainings under one budget, transfer between worlds: small versions of the commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dynamix.errors import ConfigError
from dynamix_lab.experiments.short import QUICK, learn
from dynamix_lab.experiments.transfer import PAIRS, Pair, markdown, run_transfer
from dynamix_lab.experiments.worlds import WORLDS, place_of
from dynamix_lab.simulator import ClusterEnv, Clusters
from dynamix_lab.training.worlds import lr_rule_of, sample_world
from tests.refused import refused


def _clusters(name: str, count: int, workers: int, seed: int) -> Clusters:
    return sample_world(place_of(name), count, workers, seed)


def test_worlds_differ_by_what_their_names_say() -> None:
    deep, plain = _clusters("resnet50", 64, 4, 0), _clusters("resnet34", 64, 4, 0)
    old, new = _clusters("vgg16-old", 64, 4, 0), _clusters("vgg16-new", 64, 4, 0)
    assert np.median(deep.beta) > 1.2 * np.median(plain.beta)
    assert np.median(new.beta) < 0.8 * np.median(old.beta)
    rules = [lr_rule_of(name) for name in (place_of("vgg16-adam"), place_of("vgg16"), "pai-steady")]
    assert rules == ["none", "adascale", "adascale"]
    same, again = _clusters("vgg16", 3, 4, 5), _clusters("vgg16", 3, 4, 5)
    np.testing.assert_array_equal(same.alpha, again.alpha)
    for wrong in ("vgg16", place_of("vgg99"), "nowhere:vgg16", "json:vgg16", ":", ""):
        refused(ConfigError, "MODULE:NAME", sample_world, wrong, 1, 2, 0)


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_can_be_lived_in(world: str) -> None:
    env = ClusterEnv(_clusters(world, 2, 3, 1), seed=1, lr_rule=lr_rule_of(place_of(world)))
    window = env.reset()
    for _ in range(3):
        window = env.step(window.batch_size)
    assert np.isfinite(env.progress).all()
    assert (env.progress > 0).all()


def test_every_pair_names_worlds_and_the_targets_workers_are_trained_for_it() -> None:
    for pair in PAIRS.values():
        assert {pair.source, pair.target} <= WORLDS.keys()
    assert max(PAIRS["workers: to 256, used at 1,024"].learned_at) == 256


def test_transfer_compares_source_and_target_on_the_targets_clusters_and_goes_on(tmp_path: Path) -> None:
    pairs = {"depth": Pair("vgg16", "vgg19", (2,), (2,), (2,))}
    result = run_transfer(tmp_path, pairs=pairs, budget=QUICK, clusters=3, windows=4)
    for form in ("dynamix", "dynamix-paper"):
        part = result["forms"][form]["depth"]
        assert set(part["scores"]) == {"source", "target", "shipped", "goodput"}
        assert part["regret"][1] <= part["regret"][0] <= part["regret"][2]
        assert form in markdown(result)
    written = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert run_transfer(tmp_path, pairs=pairs, budget=QUICK, clusters=3, windows=4) == result
    assert written == {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    refused(ConfigError, "another folder", run_transfer, tmp_path, pairs=pairs, budget=QUICK, clusters=3, windows=5)
    made = next(tmp_path.glob("dynamix-vgg16*.safetensors"))
    how = {"world": place_of("resnet34"), "workers": (2,), "budget": QUICK}
    refused(ConfigError, "this recipe", learn, "dynamix", made, **how)
