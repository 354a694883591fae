"""Fixed point, index, sketch and peeling, each against its torch reference and its own promises."""

from __future__ import annotations

import pytest
import torch

from dynamix.compression import Layout, LocalWire
from dynamix.errors import ConfigError
from dynamix_homomorphic import compiled, fixed_point, union
from dynamix_homomorphic.fixed_point import Scales, codes_of, quantise, scan
from dynamix_homomorphic.kernels import compiled_for
from dynamix_homomorphic.peeling import _peel, peel
from dynamix_homomorphic.sketch import Hashing, slots


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


def test_compiled_kernels_serve_the_cpu() -> None:
    assert compiled_for(torch.zeros(1)) is compiled
    assert compiled_for(torch.zeros(1, device="meta")) is None
