"""Weighted gradients are the one big batch's, whatever the split and whichever side weights them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix_homomorphic.lossy import LossyState, lossy_hook, lossy_topk_hook
from tests.ranks import run_cases, run_ranks
from tests.union import Case, Embedded, errors_of, flat_gradient

pytestmark = pytest.mark.multiproc

SCRIPTS = {1: [[3], [7], [2]], 2: [[2, 9], [7, 1], [5, 3]], 3: [[1, 8, 3], [6, 2, 2], [4, 4, 9]]}
PIECES = {1: [[8], [5]], 2: [[32, 4], [9, 27]], 3: [[32, 4, 0], [8, 5, 23]]}
LENGTHS = [[12, 4, 8], [3, 21, 0], [8, 8, 8]]
CASES: dict[str, tuple[int, Case, float]] = {}  # by name: workers, the job, how far a gradient may be off


def case(name: str, workers: int, tolerance: float = 1e-12, *, script: Any = None, **options: Any) -> None:
    given = {"epochs": 1, **options}
    CASES[f"{name}, {workers} ranks"] = workers, Case(script or SCRIPTS[workers], **given), tolerance


for count in SCRIPTS:
    case("hook side", count, epochs=2)
    # A NaN placeholder reaches the loss there too, so no tail may leave a rank without samples or be poisoned by it.
    case("loss side with tails", count, weighting="loss", samples=103)
case("a loss that is not divided sums micro-batches as plain DDP does", 2, accumulate=2, divide=False, samples=151)
case("loader workers", 2, num_workers=2, samples=150)
for kind in (None, "gather"):
    case(f"sparse embeddings, {kind}", 2, model="embedded", hook=kind)
case("sparse embeddings, loss side", 3, model="embedded", weighting="loss")
for side in ("hook", "loss"):
    case(f"accumulate=3, {side}", 3, accumulate=3, weighting=side, samples=211)
    zero: dict[str, Any] = {"script": [[0, 9, 4], [5, 0, 0], [0, 0, 7]], "min_batch_size": 0, "samples": 127}
    case(f"zero shares contribute nothing, {side}", 3, weighting=side, accumulate=2, **zero)
    # 56 samples in groups of 9, and caps of 2: one sample is over, and the micro-batches before it are placeholders
    # (NaN).
    nobodys: dict[str, Any] = {"script": [[2, 1]], "batch_size": 2, "max_batch_size": 2, "samples": 56}
    case(f"a tail whose first micro-batches are nobody's, {side}", 2, accumulate=3, weighting=side, **nobodys)
    for net in ("headless", "checkpointed"):  # buckets that are reduced before or within the backward pass
        unused = {"find_unused_parameters": net == "headless"}
        case(f"{net}, {side}", 2, model=net, weighting=side, ddp=unused)
    case(f"pieces, {side}", 3, script=PIECES[3], micro_batch=4, samples=331, min_batch_size=0, weighting=side)
for net in ("headless", "checkpointed"):
    half: dict[str, Any] = {"hook": "fp16_compress", "dtype": torch.float32}
    case(f"{net}, half precision", 2, 3e-3, model=net, ddp={"find_unused_parameters": net == "headless"}, **half)
for options in (
    {"ddp": {"gradient_as_bucket_view": True}},
    {"ddp": {"find_unused_parameters": True}},
    {"ddp": {"static_graph": True}, "synchronised": 1},
    {"ddp": {"static_graph": True}, "warm_up": True, "weighting": "loss"},
):
    case(f"accumulate with {options}", 2, accumulate=2, samples=151, **options)
for kind, bound, count in (
    ("allreduce", 1e-6, 3),
    ("powersgd", 1e-5, 2),  # at full rank it is exact up to float32, so it shows that no bucket is mixed up
    ("fp16_compress", 3e-3, 3),
    ("bf16_compress", 2e-2, 3),
):
    case(f"hook {kind}", count, bound, hook=kind, dtype=torch.float32)
case("pieces", 1, script=PIECES[1], micro_batch=4, samples=151)
for options in (
    {"ddp": {"find_unused_parameters": True}, "model": "headless"},
    {"ddp": {"static_graph": True}, "warm_up": True},
    {"model": "embedded"},
    {"model": "checkpointed"},
    {"num_workers": 4, "prefetch_factor": 4},
    {"hook": "powersgd", "dtype": torch.float32, "tolerance": 1e-5},
):
    case(f"pieces with {options}", 2, script=PIECES[2], micro_batch=4, samples=331, **options)
for options in (
    {},
    {"padded": True, "global_batch": "fixed"},
    {"accumulate": 2},
    {"micro_batch": 4, "padded": True, "global_batch": "fixed", "weighting": "loss"},
):
    by_cost: dict[str, Any] = {"batch_size": 8, "samples": 331, "min_batch_size": 0, "lengths": True}
    case(f"cut by lengths, {options}", 3, script=LENGTHS, **by_cost, **options)


@pytest.mark.timeout(600)
def test_every_applied_gradient_is_that_of_the_union_batch() -> None:
    """One test, because each process of xdist that took one of its cases would train them all."""
    told = errors_of({name: (workers, case) for name, (workers, case, _) in CASES.items()})
    assert told.keys() == CASES.keys()
    bad = {name: [e for e in errors if isinstance(e, str) or not e < CASES[name][2]] for name, errors in told.items()}
    assert {name: errors for name, errors in bad.items() if errors} == {}


def test_static_graph_says_that_its_first_backward_must_synchronise() -> None:
    wrong = 2, Case(SCRIPTS[2], accumulate=2, ddp={"static_graph": True})
    for said in errors_of({"": wrong})[""]:
        assert isinstance(said, str)
        assert "UsageError" in said
        assert "static_graph=True" in said
        assert "warm_up" in said


def _static_after_wrap(rank: int) -> float:
    net = nn.Linear(2, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    controller = dynamix.Controller("static", 2, global_batch="adaptive")
    model = controller.wrap(DDP(net), optimizer)
    model._set_static_graph()
    data = TensorDataset(torch.ones(12, 2))
    for (x,) in DataLoader(data, batch_sampler=controller.batch_sampler(data)):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        controller.step()
    controller.close()
    assert net.weight.grad is not None
    return float(net.weight.grad.sum())


def test_a_graph_that_is_said_to_be_static_after_wrap() -> None:
    assert run_ranks(_static_after_wrap, 2, timeout_s=30) == [2.0, 2.0]


def _embedded(hook: Any) -> float:
    """The error under `weighted` around a hook of torch, and around those that can leave a part of the gradient out."""
    torch.manual_seed(0)
    net = Embedded().double()
    x, reference = torch.randn(8, 6).double(), copy.deepcopy(net)
    model = DDP(net, bucket_cap_mb=1e-4)
    state = None if hook is allreduce_hook else LossyState(net, keep=1.0, hook=allreduce_hook)
    model.register_comm_hook(state, dynamix.weighted(hook, count=lambda: (4, 8)))
    model(x.split(4)[dist.get_rank()]).square().mean().backward()
    reference(x).square().mean().backward()
    return float((flat_gradient(net) - flat_gradient(reference)).abs().max())


def test_a_hook_of_ones_own_divides_nothing_that_is_not_its_bucket() -> None:
    assert max(map(max, run_cases(_embedded, 2, [allreduce_hook, lossy_hook, lossy_topk_hook]))) < 1e-12


class Flat(nn.Module):
    """Two parameters whose gradients autograd puts into one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(-1) + self.b.view(-1)) * x


def test_gradients_that_share_memory_are_corrected_once() -> None:
    data, net, controller = TensorDataset(torch.randn(32, 6)), Flat(), dynamix.Controller("static", 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = controller.wrap(net, optimizer, weighting="loss")
    for step, (x,) in enumerate(DataLoader(data, batch_sampler=controller.batch_sampler(data))):
        optimizer.zero_grad()
        controller.weight(model(x).square().mean(), count=1.0 + step % 3).backward()
        for one in (net.a, net.b):
            assert torch.allclose(torch.as_tensor(one.grad).flatten(), 4 * x.square().sum(0) / x.numel())
        optimizer.step()
        controller.step()
