"""Meeting over parameters, embeddings by rows: the same mean as without, in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix.errors import ConfigError
from dynamix.runtime import sparse_moves
from tests.ranks import run_ranks

WORDS, WIDTH = 3000, 16


def _net(words: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(words, WIDTH), nn.Linear(WIDTH, 1)).double()


def _train(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Three epochs of few rounds; the parameters at the end, and what moves took."""
    made: list[sparse_moves.SparseMoves] = []
    begin = sparse_moves.SparseMoves.__init__

    def remembered(self: sparse_moves.SparseMoves, workers: Any) -> None:
        begin(self, workers)
        made.append(self)

    sparse_moves.SparseMoves.__init__ = remembered  # type: ignore[method-assign]
    words = case.get("words", WORDS)
    net = _net(words)
    ids = torch.randint(0, words, (160,), generator=torch.Generator().manual_seed(5))
    data = TensorDataset(ids, torch.randn(160, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(6)))
    controller = dynamix.Controller("static", 12, interval=2, micro_batch=4, meet="parameters")
    loader = DataLoader(data, batch_sampler=controller.batch_sampler(data, seed=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = controller.wrap(net, optimizer, averaging=dynamix.Averaging(**case["how"]))
    for _ in range(3):
        for x, y in loader:
            with controller.piece():
                loss = (model(x) - y).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step(loss=loss)
    controller.close()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"weights": weights, "counted": made[0].statistics.as_dict() if made else {}}


def _both(rank: int, how: dict[str, Any]) -> dict[str, Any]:
    return {"dense": _train(rank, {"how": how}), "sparse": _train(rank, {"how": {**how, "sparse": True}})}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("workers", "how"),
    [(2, {}), (3, {}), (2, {"steps": "normalized"}), (2, {"wire": "bfloat16"})],
    ids=["two", "three", "normalized", "bfloat16"],
)
def test_the_mean_is_the_same_and_untouched_rows_stay_at_home(workers: int, how: dict[str, Any]) -> None:
    ran = run_ranks(_both, workers, how)
    first = ran[0]["sparse"]
    for of_rank in ran:
        assert torch.equal(of_rank["sparse"]["weights"], first["weights"]), "all go on from the same bits"
        counted = of_rank["sparse"]["counted"]
        assert counted["buckets"].get("dense", 0) == 0
        assert counted["payload_bytes"] < 0.1 * counted["dense_bytes"]
        assert not of_rank["dense"]["counted"]
    tolerance = 1e-2 if "wire" in how else 1e-13
    torch.testing.assert_close(first["weights"], ran[0]["dense"]["weights"], rtol=0, atol=tolerance)
    if workers == 2 and not how:
        assert torch.equal(first["weights"], ran[0]["dense"]["weights"]), "two addends have one order"


def _full(rank: int) -> dict[str, Any]:
    return _train(rank, {"how": {"sparse": True}, "words": 8})


@pytest.mark.multiproc
def test_moves_without_zeros_travel_densely() -> None:
    for of_rank in run_ranks(_full, 2):
        buckets: dict[str, int] = of_rank["counted"]["buckets"]
        assert buckets["dense"] >= 10


def test_rows_and_overlap_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="sparse=True"):
        dynamix.Averaging(sparse=True, overlap=True)


def test_tables_of_a_payload_come_back() -> None:
    from dynamix.runtime.averaging import Payload

    tensors: list[Tensor] = [torch.zeros(40, 3), torch.zeros(()), torch.zeros(0, 4), torch.zeros(5)]
    tensors[0][7], tensors[1], tensors[3][2] = 2.0, torch.tensor(3.0), -1.0
    payload = Payload(tensors, 0.5, wire=torch.float16)
    tables = sparse_moves.tables_of(payload)
    assert [rows.items.tolist() for rows in tables] == [[7], [0], [2], [0]]
    before = payload.flat.clone()
    sparse_moves.take(payload, tables)
    assert payload.flat.dtype == torch.float32
    assert torch.equal(payload.flat, before.float())
