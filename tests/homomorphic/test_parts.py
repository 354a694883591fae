"""Fixed point, index, sketch and peeling, each against its torch reference and its own promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamix.compression import Layout, LocalWire, index, kernels
from dynamix.errors import ConfigError
from dynamix_homomorphic import compiled, fixed_point, union
from dynamix_homomorphic.checks import checksum
from dynamix_homomorphic.fixed_point import Scales, codes_of, quantise, scan
from dynamix_homomorphic.kernels import compiled_for
from dynamix_homomorphic.lhc import UnionForecast
from dynamix_homomorphic.peeling import _peel, extract, peel
from dynamix_homomorphic.sketch import Hashing, insert_, slots
from tests.compression.local import in_threads


@given(st.lists(st.floats(width=32), min_size=1, max_size=700), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_compiled_scan_equals_torch_on_any_floats(numbers: list[float], width: int) -> None:
    rows = len(numbers) // width
    layout = Layout.of([(len(numbers), 1), (rows, width)])
    values = torch.tensor(numbers + numbers[: rows * width], dtype=torch.float32)
    codes, words = scan(values, layout)
    for s in layout.segments:
        want_codes, want_words = torch.empty(s.blocks, dtype=torch.uint8), torch.empty(s.words, dtype=torch.int32)
        fixed_point._scan(values[s.start : s.stop], s, want_codes, want_words)
        assert torch.equal(codes[s.block_slice], want_codes)
        assert torch.equal(words[s.word_slice], want_words)


def test_quantisation_error_is_half_a_unit_of_the_block_maximum() -> None:
    values = torch.randn(512, dtype=torch.float64)
    layout, scales = Layout.of([(512, 1)]), Scales.of(16)
    codes, _ = scan(values, layout)
    out = torch.empty(512, dtype=torch.int32)
    quantise(values, layout.segments[0], torch.arange(512), codes, scales, out)
    back = out.double() * scales.down[codes[0].long()]
    largest = torch.exp2(torch.floor(torch.log2(values.abs().max())) + 1)
    assert (back - values).abs().max() <= largest * 2.0**-26 / 2


def test_what_fixed_point_cannot_hold_is_marked() -> None:
    assert codes_of(torch.tensor([1e300, 2.0**128, 2.0**127.5], dtype=torch.float64)).tolist() == [255, 255, 254]
    with pytest.raises(ConfigError, match="float32"):
        fixed_point.working(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ConfigError, match="workers=0"):
        fixed_point.fraction_bits(0)


@given(st.lists(st.booleans(), max_size=400))
@settings(deadline=None)
def test_pack_and_unpack(bits: list[bool]) -> None:
    marks = torch.tensor(bits, dtype=torch.bool)
    packed = index.pack(marks)
    padded = torch.nn.functional.pad(marks, (0, packed.numel() * 8 - len(bits)))
    assert torch.equal(index._pack(padded), packed)
    assert torch.equal(index.unpack(packed), padded)
    assert torch.equal(index.positions(packed.view(torch.int32)), marks.nonzero().squeeze(1))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("density", [0.0, 0.003, 0.3, 1.0])
def test_union_is_the_or_at_every_depth(depth: int, density: float) -> None:
    layout = Layout.of([(20_011, 1), (77, 10)])
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for _ in range(3):
        keep = torch.rand(layout.elements, generator=generator) < density
        keep[4000:9000] = False  # whole blocks without a bit
        inputs.append(keep.float())
    codes, whole = scan(torch.stack(inputs).amax(0), layout)
    found = in_threads(
        LocalWire.make(3), lambda rank, wire: union.union_of(scan(inputs[rank], layout)[1], codes, layout, wire, depth)
    )
    assert all(torch.equal(one, whole) for one in found)


def test_clustered_and_thin_indices_take_fewer_bytes_in_levels() -> None:
    layout = Layout.of([(1 << 20, 1)])
    for density, most_bits in ((0.05, 0.48), (0.01, 0.16)):
        values = (torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) < density).float()
        codes, words = scan(values, layout)
        depth = union.best_depth(words, codes, layout)
        wire = LocalWire.make(1)[0]
        union.union_of(words, codes, layout, wire, depth)
        assert depth > 0
        assert wire.payload_bytes * 8 < most_bits * (1 << 20)


@pytest.mark.parametrize("width", [1, 5])
def test_compiled_sketch_and_peeling_equal_torch(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    items = (torch.rand(200_000, generator=generator) < 0.1).nonzero().squeeze(1)
    hashing = Hashing.of(items.numel(), 4)
    values = torch.randint(-(2**31), 2**31, (items.numel() * width,), generator=generator).to(torch.int32)
    found = []
    for available in (True, False):
        monkeypatch.setattr(kernels, "available", lambda available=available: available)
        where, signs = slots(items, hashing)
        table = torch.zeros(hashing.counters * width, dtype=torch.int32)
        insert_(table, where, signs, values, width)
        sketch = table.clone()
        peeling = peel(where, hashing.counters)
        out = extract(table, where, signs, peeling, width)
        assert peeling.complete
        assert len(peeling.ends) < 20
        assert torch.equal(out, values), "wrap-around arithmetic is exact for any integers"
        assert not table.any()
        rounds = np.split(peeling.order.numpy(), peeling.ends)
        by_item = torch.empty(items.numel(), dtype=torch.int64)
        by_item[peeling.order] = peeling.source.long()
        found.append((where, signs, sketch, [sorted(r) for r in rounds], by_item, checksum(values, items, width, 77)))
    one, two = found
    assert all(torch.equal(one[i], two[i]) for i in (0, 1, 2, 4))
    assert one[3] == two[3]
    assert one[5] == two[5]


@pytest.mark.parametrize("items", [0, 1, 2, 7, 40])
def test_small_sets_decode_with_one_of_a_few_seeds(items: int) -> None:
    for start in range(50):
        chosen = torch.arange(items) * 1000 + start
        tries = [Hashing.of(items, start, attempt) for attempt in range(8)]
        assert any(peel(slots(chosen, h)[0], h.counters).complete for h in tries)


def test_twins_that_share_all_counters_are_found_beforehand() -> None:
    where = torch.tensor([[0, 5, 9], [0, 5, 9], [1, 5, 8]], dtype=torch.int32)
    for peeling in (peel(where, 12), _peel(where, 12)):
        assert not peeling.complete
        assert peeling.order.tolist() == [2]


def test_too_few_counters_never_decode() -> None:
    items = torch.arange(20_000)
    hashing = Hashing.of(20_000, 0, ratio=1.1)
    where, _ = slots(items, hashing)
    assert not peel(where, hashing.counters).complete
    assert not _peel(where, hashing.counters).complete


def test_prediction_follows_growth_at_once_and_shrinking_slowly() -> None:
    prediction = UnionForecast()
    prediction.observe([1000])
    prediction.observe([4000])
    grown = prediction.expected()
    assert grown is not None
    assert 4400 <= grown[0] < 5200
    prediction.observe([100])
    after = prediction.expected()
    assert after is not None
    assert 3000 < after[0] < grown[0]


def test_compiled_kernels_serve_the_cpu() -> None:
    assert compiled_for(torch.zeros(1)) is compiled
    assert compiled_for(torch.zeros(1, device="meta")) is None
