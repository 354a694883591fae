"""Ways are registered: the built-in ones, and those that other distributions bring by entry point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamix import plugins
from dynamix.compression import BucketExchange, CompressionState, Layout, ways
from dynamix.compression.auto import Chooser
from dynamix.compression.spread import Spread
from dynamix.compression.traffic import densely, traffic
from dynamix.compression.ways import Registry, Way
from dynamix.errors import ConfigError
from tests.compression.local import exchange

INSTALL = r"pip install \./homomorphic  \(in dynamix's source tree\)"


class Entry:
    """An entry point of another distribution."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self.dist, self.load = name, None, load


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    """Says which entry points there are, and returns the registry that comes of them."""

    def among(*entries: Entry) -> Registry:
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group == "dynamix.compression" else ())
        ways.registry.cache_clear()
        return ways.registry()

    monkeypatch.syspath_prepend(str(tmp_path))  # another path: what was found before is not taken
    yield among
    ways.registry.cache_clear()


def _mine(registry: Registry) -> None:
    def reduce_(bucket: BucketExchange, flat: torch.Tensor, wire: Any, step: int) -> None:
        wire.mean(flat)
        flat += 1

    registry.add(Way("mine", traffic=densely, exchange=reduce_, candidate=True))


def test_without_others_there_are_three_and_auto_tries_two(installed: Callable[..., Registry]) -> None:
    found = installed()
    assert found.names == ("dense", "gather", "blocks")
    assert found.candidates == Chooser().candidates == ("gather", "blocks")
    assert found.link is None


@pytest.mark.parametrize("mode", ["fixed", "compaction", "lhc", "lhc-one-phase"])
def test_modes_that_are_not_installed_say_what_to_install(mode: str, installed: Callable[..., Registry]) -> None:
    installed()
    with pytest.raises(ConfigError, match=f"mode='{mode}'.*{INSTALL}"):
        CompressionState(mode)
    with pytest.raises(ConfigError, match=INSTALL):
        exchange([torch.zeros(8)], mode, Layout.of([(8, 1)]))


def test_an_aggregator_that_is_not_installed_says_what_to_install(installed: Callable[..., Registry]) -> None:
    installed()
    with pytest.raises(ConfigError, match=INSTALL):
        CompressionState(aggregator="127.0.0.1:1")


@pytest.mark.parametrize("mode", ["aggregator-compaction", "aggregator-gather", "atuo"])
def test_what_is_no_mode_is_refused_with_all_that_are(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"mode='{mode}' .*allowed is auto, dense, "):
        CompressionState(mode)


def test_a_way_of_another_distribution_is_taken_like_a_built_in_one(installed: Callable[..., Registry]) -> None:
    found = installed(Entry("other", lambda: _mine))
    assert found.candidates == ("gather", "blocks", "mine")
    (result, _), _ = exchange([torch.ones(8), 3 * torch.ones(8)], "mine", Layout.of([(8, 1)]))
    assert result.tolist() == [3.0] * 8
    spread = Spread([1000] * 4, 4000, 100_000)
    assert traffic("mine", spread) == traffic("dense", spread)


def _takes_a_name(registry: Registry) -> None:
    registry.add(Way("before"))
    registry.add(Way("gather"))


def _does_not_import() -> Any:
    raise ModuleNotFoundError("No module named 'gone'")


@pytest.mark.parametrize(
    ("load", "why"), [(_does_not_import, "No module named 'gone'"), (lambda: _takes_a_name, "way='gather'")]
)
def test_what_does_not_import_or_takes_a_name_is_left_out_and_said_once(
    load: Callable[[], Any], why: str, installed: Callable[..., Registry], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = installed(Entry("broken", load), Entry("other", lambda: _mine))
        assert ways.registry() is found
    assert found.names == ("dense", "gather", "blocks", "mine")
    assert len(caplog.records) == 1
    assert "broken" in caplog.text
    assert "left out" in caplog.text
    assert why in caplog.text
