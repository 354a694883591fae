"""Checks that all ranks hold equal values: one digest is compared; if it differs, the fields are, by name."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dynamix.errors import UsageError

_COMPARING = "the ranks could not compare what they hold"
VERSION = "version of dynamix"
PLACE = ("optimizer steps", "samples trained", "position in the data", "batches not trained")
GROUPS = "number of parameters of each parameter group"
MOST_FIELDS = 5  # in one message
SKETCHED = "parameters: "  # begins a parameter's name; its value is (sum of every second entry, of the others, norm)
NEAR = 1e-3  # tolerance of those sums, relative to the norm: unlike devices differ in last bits
LONGEST_VALUE = 80  # characters of a value in a message
_SAMPLER = "Write controller.batch_sampler(dataset, seed=0) with the same data set, seed and options on every rank"
_LOAD = "Load the checkpoint of the same step on every rank: controller.load_state_dict(state)"
_POSITION = ("position", "finished", "taken", "consumed", "batch sizes", "progress", "base batch")
FIXES = {
    "": "Make the same calls with the same arguments on every rank before training",
    "dataset_size": "Give every rank the whole data set, of one length, and the same indices= and num_samples=: the "
    "sampler deals its samples to the ranks",
    "epoch": f"Call sampler.set_epoch(epoch) alike on every rank. {_LOAD}",
    "seed": f"{_SAMPLER}: seed=0, not seed=rank; the sampler deals the ranks different samples by itself",
    **dict.fromkeys(("lengths", "padded"), "Give batch_sampler(dataset, lengths=...) the same on every rank"),
    "indices": "Give batch_sampler(dataset, indices=...) the same on every rank: the sampler deals them to the ranks",
    "weights": "Give batch_sampler(dataset, weights=...) the same on every rank",
    **dict.fromkeys(("samples", "shuffle", "partition", "sharded"), _SAMPLER),
    **dict.fromkeys(_POSITION, _LOAD),
    "parameters": "Load weights on every rank, or before DDP(net) is made, which sends the first rank's to all",
    "optimizers": "Make the same optimizers of the same parameters, with the same arguments, on every rank",
}
_OF_POWERSGD = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start"),
    "batch_tensors_with_same_shape",
)
# Arguments of an optimizer that say how it computes; unlike devices may need different values.
HOW = ("foreach", "fused", "capturable", "differentiable")


def require_same(
    facts: Mapping[str, Any],
    rows: Callable[[torch.Tensor, str], Any],
    what: str,
    fixes: Mapping[str, str],
    near: Mapping[str, float],
) -> None:
    """Raise `UsageError` on every rank if `facts` (plain values by field) differ. A collective call.

    rows   gathers every rank's row of numbers, (W, n); the second argument names the purpose; see `Ranks.rows`
    what   start of the message
    fixes  by field, what to write; the entry under "" serves fields without their own
    near   by field, the relative difference up to which its numbers count as equal
    """
    whole = json.dumps({name: json.dumps(value, sort_keys=True, default=plain) for name, value in facts.items()})
    digest = int.from_bytes(hashlib.sha256(whole.encode()).digest()[:8], "big") >> 1
    mine = torch.tensor([digest, len(whole)])
    every = rows(mine, _COMPARING)
    if (every == every[0]).all():
        return
    longest = int(every[:, 1].max())
    packed = torch.from_numpy(np.frombuffer(whole.encode().ljust(longest), dtype=np.uint8).copy())
    told = [json.loads(bytes(row)) for row in rows(packed, _COMPARING).astype(np.uint8)]
    fields = list(dict.fromkeys(name for of_rank in told for name in of_rank))
    differing = [name for name in fields if _differs(name, [of_rank.get(name) for of_rank in told], near.get(name))]
    if not differing:
        return
    before = (VERSION, "error", GROUPS)  # differences that explain all others
    differing = next(([name] for name in before if name in differing), differing)
    if differing == ["error"]:
        rank, error = next((rank, json.loads(of["error"])) for rank, of in enumerate(told) if of["error"] != "null")
        raise UsageError(f"on rank {rank}: {error}")
    said = [f"{name} is {by_rank([of_rank.get(name, 'missing') for of_rank in told])}" for name in differing]
    more = f" (and {len(said) - MOST_FIELDS} more)" if len(said) > MOST_FIELDS else ""
    fix = fixes.get(differing[0].partition(":")[0], fixes[""])
    raise UsageError(f"{what}: {'; '.join(said[:MOST_FIELDS])}{more}. {fix}")


def _differs(name: str, values: list[str | None], near: float | None) -> bool:
    if near is not None and None not in values:
        first, *others = (json.loads(value or "") for value in values)
        return not all(_close(first, other, near) for other in others)
    if len(set(values)) == 1 or not name.startswith(SKETCHED) or None in values:
        return len(set(values)) > 1
    *sums, norms = zip(*(json.loads(value or "") for value in values), strict=True)
    return not all(max(of) - min(of) <= NEAR * max(norms) for of in sums)


def _close(one: Any, other: Any, near: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_close(*both, near) for both in zip(one, other, strict=True))
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return one == other or (numbers and math.isclose(one, other, rel_tol=near, abs_tol=1e-15))


def by_rank(values: list[str]) -> str:
    """Which ranks have which value, as text.

    >>> by_rank(["0", "0", "0", "7"])
    '0 on ranks 0-2, 7 on rank 3'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    cut = {value: f"{value[:LONGEST_VALUE]}{'...' * (len(value) > LONGEST_VALUE)}" for value in ranks}
    return ", ".join(f"{cut[value]} on {_spans(of)}" for value, of in ranks.items())


def _spans(ranks: list[int]) -> str:
    """
    >>> _spans([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    in_a_row = itertools.groupby(enumerate(ranks), lambda at: at[1] - at[0])
    spans = [[rank for _, rank in row] for _, row in in_a_row]
    told = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"


def plain(value: Any) -> Any:
    """A value that JSON can write: arrays as lists, anything else as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else str(value)


def settings_of(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The settings of each optimizer, plain values by name.

    >>> settings_of([torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)])["optimizers: lr"]
    [0.1]
    """
    kinds = [f"{type(of).__name__} of {[len(group['params']) for group in of.param_groups]}" for of in optimizers]
    names = dict.fromkeys(name for of in optimizers for name in of.defaults if name not in HOW)
    told = {f"optimizers: {name}": [_argument(of.defaults.get(name)) for of in optimizers] for name in names}
    return {"optimizers": kinds, **told}


def _argument(value: Any) -> Any:
    """A plain value; None if reading it needs a device."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value if isinstance(value, bool | int | float | str | tuple | list | None) else None


@torch.no_grad()
def sketches_of(model: DistributedDataParallel, number: int) -> dict[str, list[float]]:
    """Sketches of the parameters that DDP sends to all ranks, by name, to detect models that differ. Reads from the
    device.

    number   of the model, from 0
    """
    left_out, of = getattr(model, "parameters_to_ignore", ()), f"of model {number}, " if number else ""
    sent = {name: p.detach() for name, p in model.module.named_parameters() if name not in left_out and sums(p)}
    sketches = [sketch(value) for value in sent.values()]
    told = torch.stack(sketches).tolist() if sketches else []
    return {f"{SKETCHED}{of}{name}": sketch for name, sketch in zip(sent, told, strict=True)}


def sketch(value: torch.Tensor) -> torch.Tensor:
    """(sum of entries 0, 2, ..., sum of entries 1, 3, ..., norm) of a tensor, on the CPU. Reads from the device."""
    own = value.to_local() if hasattr(value, "to_local") else value
    flat = (torch.view_as_real(own) if own.is_complex() else own).reshape(-1)
    wide = map(torch.Tensor.double, flat.split(2**20))  # in parts, or peak memory could grow by a whole copy
    each = [torch.stack([part[0::2].sum(), part[1::2].sum(), part.square().sum()]) for part in wide]
    even, odd, square = torch.stack(each).sum(0)
    return torch.stack([even, odd, square.sqrt()]).cpu()


def sums(parameter: torch.Tensor) -> bool:
    """Whether the tensor has entries that torch can add up."""
    kind = parameter.dtype
    return parameter.numel() > 0 and (kind.is_complex or (kind.is_floating_point and kind.itemsize > 1))


def hook_settings(state: Any) -> dict[str, Any]:
    """PowerSGD's settings, plain values by name; states of other hooks may differ by rank."""
    if not all(hasattr(state, name) for name in (*_OF_POWERSGD, "rng")):
        return {}
    return {name: getattr(state, name) for name in _OF_POWERSGD} | {"random_seed": int(state.rng.get_state()[1][0])}
