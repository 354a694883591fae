"""Whether ranks still hold the same while they train: what a row says of it, and what the rows of all ranks tell.

A digest of optimizers' group settings and of the place in the data is compared exactly. Some elements of the parameters
are copied without waiting for their device, and compared as a difference over what a window moves: devices that are not
alike differ in last bits.
"""

import hashlib
import math
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.runtime.facts import beside
from dynamix.runtime.facts.beside import Told
from dynamix.runtime.measure.recorder import Newest
from dynamix.runtime.measure.row import ELEMENTS, HELD
from dynamix.runtime.ranks.compare import GROUPS, HOW, PLACE
from dynamix.window import Floats

_OWN = frozenset(("params", "param_names", "device", *HOW))  # of a group: what ranks may well have unlike
_PLAIN = frozenset((bool, int, float, str, type(None)))
_TORCH, _OTHER, _ON_DEVICE = 1e-9, 1e-3, 1e-5  # so near do settings count as equal: math libraries differ in last bits
_WARN, _MOST = 1e-3, 1e-2  # of what a window moves
_GROWING, _GROWTH = 3, 1.05  # windows running above `_WARN`, each that much above the one before
_ROUNDING = 4.0  # by so much of their precision may elements differ more after every optimizer step
_WINDOWS = 16  # after which differences are counted from anew
_REDRAW = 128  # windows after which elements are drawn again, of further parameters where there are many
_WHY = (
    "Gradients are equal on all ranks, so something else changes parameters: a layer that was unfrozen or added after "
    "DDP was made, and that DDP does not average (make DDP after it), or code that writes parameters or optimizers on "
    "some ranks only (run it on all)"
)


@dataclass(frozen=True)
class DrawnElements:
    """Elements of parameters, on one device; what is read of them is what they hold then.

    names     of the parameters that `elements` are of
    memory    of these parameters when they were drawn
    epsilon   the relative precision of each element's type
    key       tells what was drawn; the same on ranks that drew the same
    """

    elements: list[Tensor]
    names: list[str]
    parameters: list[Tensor]
    memory: list[int]
    epsilon: Floats
    key: float


class Parting:
    """One rank's part: what its rows say, and what it makes of all ranks' rows where it sees them.

    wrong    what to tell the user, where parameters have parted; None: they have not
    """

    def __init__(self, optimizers: Sequence[Optimizer] = (), models: Sequence[nn.Module] = ()) -> None:
        self.wrong: str | None = None
        self._optimizers, self._models = list(optimizers), list(models)
        self._warning: str | None = None
        self._warned = self._differ = False
        self._on_device: list[Tensor] = []  # settings of the newest row
        self._drawn: DrawnElements | None = None
        self._windows = self._draws = self._count = 0
        # Elements and settings of their device, with key, step and number of the elements.
        self._read = Newest(([], (math.nan, math.nan, 0)))
        self._drift = Drift()
        self._beside: Told | None = None  # in this window
        self._told = 0  # windows in which something was

    def begun_anew(self) -> "Parting":
        """One that watches the same, and has seen nothing of it yet."""
        return Parting(self._optimizers, self._models)

    # ------------------------------------------------------------ of this rank

    def watch(self, optimizer: Optimizer) -> None:
        """Its settings are to be the same on all ranks."""
        self._optimizers.append(optimizer)

    def connect(self, model: nn.Module) -> None:
        """Its parameters are to be the same on all ranks after every optimizer step."""
        self._models.append(model)

    def tell_beside(self, told: Told) -> None:
        """This rank has trained samples that it was not dealt."""
        self._beside = told if self._told < _WINDOWS else None

    def _figures(self, told: Told) -> list[float]:
        """Figures of the samples beside those that were dealt. Waits for their device."""
        self._beside, self._told = None, self._told + 1
        return [float(value) for value in told]

    def row(self, place: Mapping[str, int]) -> list[float]:
        """The part of a window's row that tells: digests, the step and elements of a sample, and the elements.

        place    counters of optimizer steps, samples and so on, by name
        """
        optimizers, models = self._optimizers, self._models
        if self._warning is not None and not self._warned:
            self._warned = True
            warnings.warn(self._warning, RuntimeWarning, stacklevel=2)
        settings: list[Any] = [*place.values()]
        self._on_device.clear()
        count = 0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                settings.append(len(group["params"]))
                count += settings[-1]
                # In one pass and without names: this runs in the training thread, with nothing of it in a cache.
                values = map(group.get, _settings(optimizer, group))
                settings += [v if type(v) in _PLAIN else self._plain(v) for v in values]
        if self._drawn is None or count != self._count or self._windows % _REDRAW == 0:
            self._drawn, self._draws, self._count = draw(optimizers, models, self._draws), self._draws + 1, count
        elif [p.data_ptr() for p in self._drawn.parameters] != self._drawn.memory:  # as after `p.data = other`
            # On this rank, perhaps, alone: the same elements.
            self._drawn = draw(optimizers, models, self._draws - 1)
        self._windows += 1
        drawn, own = self._drawn, self._drawn.elements
        late = [setting for setting in self._on_device if not own or setting.device == own[0].device]
        # On a CPU it is here at once; from a device it comes with a later row.
        self._read.send([*own, *late], (drawn.key, place[PLACE[0]], len(own)))
        seen, (key, step, elements) = self._read.here
        others = _NO_OTHERS if self._beside is None else self._figures(self._beside)
        told = [digest_of(settings), digest_of(seen[elements:]), float(step), key, *others, *seen[:elements]]
        return told + [math.nan] * (len(HELD) - len(told))

    def facts(self, place: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, float]]:
        """The facts behind the digests, plain values by name; and how near some of them must be."""
        optimizers = self._optimizers
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        facts, near, self._on_device = {**place, GROUPS: sizes}, dict[str, float](), []
        seen, (_, _, elements) = self._read.here
        late = iter(seen[elements:])
        for number, optimizer in enumerate(optimizers):
            # Other optimizers than torch's may keep sums in their groups, which devices make in other orders.
            precision = _TORCH if type(optimizer).__module__.startswith("torch.") else _OTHER
            of = f" of optimizer {number}" if number else ""
            for index, group in enumerate(optimizer.param_groups):
                for name in _settings(optimizer, group):
                    value, field = self._plain(group.get(name)), f"{name} of parameter group {index}{of}"
                    facts[field] = next(late, None) if value is _LATE else value
                    near[field] = _ON_DEVICE if value is _LATE else precision
        return facts, near

    def _plain(self, value: Any) -> Any:
        """The value by which a setting is compared; None for what cannot be."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.device.type not in ("cpu", "cuda"):
                return None
            if value.device.type == "cpu":
                return value.item()
            self._on_device.append(value.detach().reshape(()))
            return _LATE
        if isinstance(value, (tuple, list)):
            return tuple([v if type(v) in _PLAIN else self._plain(v) for v in value])
        if isinstance(value, np.generic):
            return value.item()
        return value if isinstance(value, (int, float, str)) else None

    # ------------------------------------------------------------ of all ranks

    def look(self, told: Floats) -> None:
        """Take what all ranks' rows say, (W, n), into account. Windows come in order."""
        if told[0, 4] == told[0, 4] and (why := beside.wrong(told[:, 4:8])) is not None:  # seldom a number
            self.wrong = why
            return
        digest, late, step, key = told[:, :4].T
        together = _alike(step) and _alike(key)
        known = np.isfinite(digest).all()
        self._differ |= bool(known and not _alike(digest)) or bool(together and not _alike(late))
        drawn = self._drawn
        if self._differ or not together or drawn is None or drawn.key != key[0]:
            return  # settings that differ are the reason for parameters that do
        worst = self._drift.look(drawn, int(step[0]), told[:, 8 : 8 + len(drawn.elements)])
        if worst is not None:
            said, certain = worst
            self.wrong, self._warning = (said, None) if certain else (None, said)

    def differ(self) -> bool:
        """Whether digests were not alike since this was asked last."""
        differ, self._differ = self._differ, False
        return differ


class Drift:
    """How far the sampled elements of ranks are apart, over what a window moves.

    Differences are counted from some windows ago, since a long job adds up last bits; and so is the most that a window
    has moved, since a rate may fall to nothing. Differences in the last bits, which devices make, are ignored: so much
    of an element's precision for every optimizer step.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, Floats] | None = None  # key, optimizer step and elements (W, n)
        self._base: tuple[int, Floats] = 0, np.zeros(0)  # optimizer step, and differences from rank 0 (W, n)
        self._windows = self._growing = 0  # since then; and those that grow
        self._moved = self._last = 0.0

    def look(self, drawn: DrawnElements, step: int, elements: Floats) -> tuple[str, bool] | None:
        """Compare the elements (W, n) with those of the window before: what is wrong, and whether that is certain."""
        before, self._before = self._before, (drawn.key, step, elements)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = elements - elements[0]
            if before is None or before[0] != drawn.key or before[1] >= step:
                self._begin(step, apart, 0.0)
                return None
            since, base = self._base
            added, moved = np.abs(apart - base), np.abs(elements - before[2])
            size = np.maximum(np.abs(elements), np.abs(before[2])).max(0)
            seen = added > _ROUNDING * drawn.epsilon * size * (1 + step - since)
        added = np.where(seen & np.isfinite(added), added, 0.0)
        now = float(np.where(np.isfinite(moved), moved, 0.0).max(initial=0.0))
        self._moved, self._windows = max(self._moved, now), self._windows + 1
        ratio = float(added.max(initial=0.0)) / self._moved if self._moved else 0.0
        self._growing = self._growing + 1 if ratio > max(_WARN, _GROWTH * self._last) else 0
        self._last = ratio
        if self._windows == _WINDOWS:
            self._begin(step, apart, now)
        if ratio <= _WARN:
            return None
        rank, at = np.unravel_index(int(added.argmax()), added.shape)
        what = f"{drawn.names[int(at)]} of rank {rank} differs from rank 0 by {ratio:.2g} times the change of a window"
        said = f"parameters are no longer equal on all ranks at optimizer step {step}: {what}. {_WHY}"
        return said, ratio > _MOST or self._growing >= _GROWING

    def _begin(self, step: int, apart: Floats, moved: float) -> None:
        self._base, self._moved, self._windows, self._last = (step, apart), moved, 0, 0.0


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """Names of what is compared; what a loop keeps in `group` besides, perhaps on one rank, moves nothing."""
    return [name for name in getattr(optimizer, "defaults", group) if name not in _OWN]


def draw(optimizers: Iterable[Optimizer], models: Iterable[nn.Module], turn: int) -> DrawnElements:
    """Elements of what `optimizers` step of `models`, by a rule that is the same on all ranks.

    turn   other ones have other parameters, where there are more than elements
    """
    own = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for model in models for name, p in _whole(model) if id(p) in own]
    named = [(name, p) for name, p in named if p.device == named[0][1].device]
    elements, names, parameters, turn = [], [], [], turn if len(named) > ELEMENTS else 0
    for number in range(ELEMENTS if named else 0):
        name, parameter = named[(number * len(named) // ELEMENTS + turn) % len(named)]
        index = np.unravel_index(_SPREAD * (number + 1) % parameter.numel(), parameter.shape)
        elements.append(parameter.detach()[tuple(map(int, index))])
        names.append(name)
        parameters.append(parameter)
    epsilon = np.array([torch.finfo(element.dtype).eps for element in elements])
    memory = [p.data_ptr() for p in parameters]
    return DrawnElements(elements, names, parameters, memory, epsilon, digest_of([names, len(named)]))


def _whole(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters that every rank has whole and DDP adds the gradients of, by name."""
    ignored = getattr(model, "parameters_to_ignore", ())
    for name, p in getattr(model, "module", model).named_parameters():
        plain = type(p) is nn.Parameter and p.layout == torch.strided and p.device.type in ("cpu", "cuda")
        if name not in ignored and plain and p.is_floating_point() and p.dtype.itemsize > 1 and p.numel():
            yield name, p


def digest_of(values: Sequence[Any]) -> float:
    """A digest of plain values, their floats to seven digits: 48 bits, which float64 holds exactly.

    >>> digest_of([0.1, 3, (0.9, "b")]) == digest_of([0.1 + 1e-16, 3, (0.9, "b")]) != digest_of([0.1, 4, (0.9, "b")])
    True
    """
    floats = array("f", [value for value in values if type(value) is float]).tobytes()
    others = repr([value for value in values if type(value) is not float])
    return float(int.from_bytes(hashlib.blake2b(floats + others.encode(), digest_size=6).digest(), "big"))


def _alike(values: Floats) -> bool:
    return bool((values == values[0]).all())


_SPREAD = 0x9E3779B1  # a prime near 2**32 over the golden ratio: multiples of it spread over any number of elements
_LATE = "(on its device)"
_NO_OTHERS = [math.nan] * 4
