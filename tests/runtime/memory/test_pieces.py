"""What needs no ranks: telling errors apart, stretching batches, the search, foreseeing growth."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import ConfigError, UsageError
from dynamix.probes.host import Cgroups
from dynamix.runtime.memory.batches import length, resized
from dynamix.runtime.memory.gauge import Gauge, is_out_of_memory
from dynamix.runtime.memory.limits import Search, within
from dynamix.window import Bounds

Pair = namedtuple("Pair", "x y")


def test_the_cpu_allocators_own_error_is_out_of_memory_and_others_are_not() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with pytest.raises(RuntimeError) as other:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(other.value)
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


def test_batches_of_any_structure_are_stretched_alike() -> None:
    x = torch.arange(6).reshape(3, 2)
    batch = {"pair": Pair(x, ["a", "b", "c"]), "rest": [x[:, 0], (0.5, None)], "box": UserDict(y=x)}
    assert length(batch) == 3
    longer = resized(batch, 7)
    assert isinstance(longer["box"], UserDict)
    assert longer["rest"][1] == (0.5, None)
    assert longer["pair"].x[:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert longer["pair"].y == list("abcabca")
    with pytest.raises(UsageError, match="no tensor"):
        length({"text": "nothing"})


@dataclass
class Plain:
    x: torch.Tensor
    names: list[str] = field(default_factory=list)
    about: str = "kept"


@dataclass(frozen=True, slots=True)
class Frozen:
    about: str
    inner: Plain


@attrs.frozen
class OfAttrs:
    about: str
    x: torch.Tensor


class Ordinary:
    """Not iterable, no fields: a user's own class with a collate function that makes it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.about, self.itself = x, "kept", self


@pytest.mark.parametrize(
    ("make", "x_of"),
    [
        (Plain, lambda batch: batch.x),
        (lambda x: Frozen("kept", Plain(x)), lambda batch: batch.inner.x),
        (lambda x: OfAttrs("kept", x), lambda batch: batch.x),
        (lambda x: SimpleNamespace(about="kept", x=x), lambda batch: batch.x),
        (lambda x: (Ordinary(x), Plain(x)), lambda batch: batch[1].x),
        (Ordinary, lambda batch: batch.x),
    ],
)
def test_limits_are_found_with_batches_that_are_objects(make: Any, x_of: Any) -> None:
    net = nn.Linear(2, 1)
    controller = dynamix.Controller("static", 4, max_batch_size=16)
    controller.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    example, seen = make(torch.arange(6.0).reshape(3, 2)), set()

    def step_fn(batch: Any) -> None:
        seen.add(len(x_of(batch)))
        assert type(batch) is type(example)
        assert getattr(batch, "about", "kept") == "kept"
        net(x_of(batch)).sum().backward()

    assert controller.find_limits(step_fn, example) == [16]
    assert 16 in seen
    assert len(x_of(example)) == 3, "the user's example stays as it is"
    controller.close()


def test_what_has_no_tensor_is_told_what_to_pass() -> None:
    with pytest.raises(UsageError, match=r"of type Plain, has no tensor .* a data class or attributes of an object"):
        length(Plain(torch.tensor(3.0)))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 4000), st.integers(0, 5000), st.integers(1, 16))
def test_the_search_ends_near_the_largest_that_fits(low: int, span: int, largest: int, quantum: int) -> None:
    low, high = low * quantum, (low + span) * quantum
    search, tries = Search(low, high, quantum=quantum), 0
    while not search.done:
        assert low <= search.size <= high
        assert search.size % quantum == 0
        search.tell(fitted=search.size <= largest)
        tries += 1
    true = min(largest, high) // quantum * quantum
    assert search.fits <= true
    assert search.fits == (0 if largest < low else search.fits)
    assert true < low or true - search.fits <= max(quantum, search.fits // 32)
    assert tries <= 24


def test_a_size_that_no_longer_fits_beside_the_others_is_given_up() -> None:
    search = Search(2, 100, quantum=1)
    while not search.done:
        search.tell(fitted=search.size <= 100)
    assert search.size == 100
    while not (search.done and search.size <= 37):
        search.tell(fitted=search.size <= 37)
    assert search.fits == 37


def test_growth_is_foreseen_from_smaller_batches(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(str(1000 * 2**20))
    (tmp_path / "memory.current").write_text(str(500 * 2**20))
    gauge = Gauge(torch.device("cpu"), cgroups=Cgroups(memory=(tmp_path,)))
    room = gauge.headroom_bytes()
    assert 440 * 2**20 < room <= 450 * 2**20
    assert gauge.allows(10_000, room), "nothing was seen yet"
    gauge.points.append((8, 20 * 2**20))
    assert gauge.growth_bytes(16) == pytest.approx(56 * 2**20), "one size alone: in proportion, and four tenths more"
    gauge.points.append((16, 30 * 2**20))
    assert gauge.growth_bytes(32) == pytest.approx(70 * 2**20), "two sizes tell the fixed part"
    assert gauge.allows(64, room)
    most = max(size for size in range(1, 10_000) if gauge.allows(size, room))
    assert gauge.growth_bytes(most) <= room < gauge.growth_bytes(most + 1)
    gauge.sharers = 2
    assert not gauge.allows(most, room)
    assert math.isnan(Gauge(torch.device("cpu")).growth_bytes(3))


def test_what_a_batch_takes_is_measured() -> None:
    gauge = Gauge(torch.device("cpu"))
    with gauge.measure(3):
        block = torch.ones(10 * 2**20)
        del block
    assert gauge.points[0][1] == pytest.approx(40 * 2**20, rel=0.2)


def test_caps_go_into_the_bounds_or_say_why_not() -> None:
    bounds = within(Bounds.of(2, 1, 64), torch.tensor([64, 20]).numpy())
    assert bounds.high.tolist() == [64, 20]
    assert int(bounds.total_high) == 84
    with pytest.raises(ConfigError, match="min_global_batch=100"):
        within(Bounds.of(2, 1, 64, total_low=100), torch.tensor([64, 20]).numpy())
    fits = within(Bounds.of(2, 1, 64, total_low=100), torch.tensor([64, 20]).numpy(), may_fall=True)
    assert (int(fits.total_low), fits.high.tolist()) == (84, [64, 20])  # nobody said that it may not


def test_calls_out_of_order_say_what_to_do() -> None:
    controller = dynamix.Controller("static", batch_size=8, global_batch="adaptive")
    with pytest.raises(UsageError, match="wrap"):
        controller.find_limits(lambda batch: None, torch.zeros(2))
    controller.batch_sampler(TensorDataset(torch.zeros(100, 1)))
    net = nn.Linear(1, 1)
    controller.wrap(net, torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ConfigError, match=r"margin=1\.5"):
        controller.find_limits(lambda batch: None, torch.zeros(2), margin=1.5)


OWN_LOOP = """
import torch, dynamix
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(100, 1))
controller = dynamix.Controller("static", batch_size=24)
loader = DataLoader(data, batch_sampler=controller.batch_sampler(data))
net = torch.nn.Linear(1, 1)
model = controller.wrap(net, torch.optim.SGD(net.parameters(), 0.1))
for x, in loader:
    torch.empty(2**60)
"""


def test_out_of_memory_in_ones_own_loop_ends_the_process_and_says_which_cap_to_set() -> None:
    done = subprocess.run([sys.executable, "-c", OWN_LOOP], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "DefaultCPUAllocator" in done.stderr
    assert "rank 0 ran out of memory in a pass of 24 samples" in done.stderr
    assert "max_batch_size=[...]" in done.stderr
    assert "find_limits" in done.stderr
