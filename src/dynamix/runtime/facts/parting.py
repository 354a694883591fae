"""Checks during training that ranks hold equal state: what a row says of it, and what all ranks' rows show.

A digest of optimizers' group settings and of the position in the data is compared exactly. Some elements of the
parameters are copied without waiting for their device. They are compared relative to a window's change of parameters,
because unlike devices differ in the last bits.
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

_OWN = frozenset(("params", "param_names", "device", *HOW))  # entries of a group that may differ by rank
_PLAIN = frozenset((bool, int, float, str, type(None)))
_TORCH, _OTHER, _ON_DEVICE = 1e-9, 1e-3, 1e-5  # tolerances of settings: math libraries differ in last bits
_WARN, _MOST = 1e-3, 1e-2  # relative to a window's change of parameters
_GROWING, _GROWTH = 3, 1.05  # consecutive windows above `_WARN`, each larger than the last by this factor
_ROUNDING = 4.0  # elements may differ by this many times their precision more per optimizer step
_WINDOWS = 16  # after which the reference for differences is renewed
_REDRAW = 128  # windows after which elements are drawn again, of other parameters if there are many
_WHY = (
    "Either nothing averages their gradients (write DDP(net), after all layers were added and unfrozen), or code "
    "writes parameters or optimizers on some ranks only (run it on all ranks)"
)


@dataclass(frozen=True)
class DrawnElements:
    """Elements of parameters, on one device. They are views: reading them gives their values at that time.

    names     names of the parameters of `elements`
    memory    addresses of these parameters when they were drawn
    epsilon   the relative precision of each element's type
    key       identifies what was drawn; equal on ranks that drew the same
    """

    elements: list[Tensor]
    names: list[str]
    parameters: list[Tensor]
    memory: list[int]
    epsilon: Floats
    key: float


class Parting:
    """One rank's checks of shared state: writes figures into rows, and compares all ranks' rows if it gets them.

    wrong    the message if parameters differ between ranks, or samples from those dealt; None if not
    """

    def __init__(self, optimizers: Sequence[Optimizer] = (), models: Sequence[nn.Module] = ()) -> None:
        self.wrong: str | None = None
        self._optimizers, self._models = list(optimizers), list(models)
        self._warning: str | None = None
        self._warned = self._differ = False
        self._on_device: list[Tensor] = []  # settings for the newest row
        self._drawn: DrawnElements | None = None
        self._windows = self._draws = self._count = 0
        # Elements and settings on their device; with key, step and number of elements.
        self._read = Newest(([], (math.nan, math.nan, 0)))
        self._drift = Drift()
        self._beside: Told | None = None  # reported in this window
        self._told = 0  # windows with such a report

    def begun_anew(self) -> "Parting":
        """A new object with the same models and optimizers."""
        return Parting(self._optimizers, self._models)

    # ------------------------------------------------------------ of this rank

    def watch(self, optimizer: Optimizer) -> None:
        """Check that its settings are equal on all ranks."""
        self._optimizers.append(optimizer)

    def connect(self, model: nn.Module) -> None:
        """Check that its parameters are equal on all ranks after every optimizer step."""
        self._models.append(model)

    def tell_beside(self, told: Told) -> None:
        """Report that this rank has trained samples that it was not dealt."""
        self._beside = told if self._told < _WINDOWS else None

    def _figures(self, told: Told) -> list[float]:
        """Figures of samples that were not dealt. Waits for their device."""
        self._beside, self._told = None, self._told + 1
        return [float(value) for value in told]

    def row(self, place: Mapping[str, int]) -> list[float]:
        """This rank's figures for a window's row: digests, the sample's step and key, and the elements.

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
                # One pass, without names: this runs in the training thread, with a cold cache.
                values = map(group.get, _settings(optimizer, group))
                settings += [v if type(v) in _PLAIN else self._plain(v) for v in values]
        if self._drawn is None or count != self._count or self._windows % _REDRAW == 0:
            self._drawn, self._draws, self._count = draw(optimizers, models, self._draws), self._draws + 1, count
        elif [p.data_ptr() for p in self._drawn.parameters] != self._drawn.memory:  # as after `p.data = other`
            # This may be so on this rank only, so draw the same elements.
            self._drawn = draw(optimizers, models, self._draws - 1)
        self._windows += 1
        drawn, own = self._drawn, self._drawn.elements
        late = [setting for setting in self._on_device if not own or setting.device == own[0].device]
        # From a CPU it arrives at once; from a device it arrives with a later row.
        self._read.send([*own, *late], (drawn.key, place[PLACE[0]], len(own)))
        seen, (key, step, elements) = self._read.here
        others = [math.nan] * 4 if self._beside is None else self._figures(self._beside)
        told = [digest_of(settings), digest_of(seen[elements:]), float(step), key, *others, *seen[:elements]]
        return told + [math.nan] * (len(HELD) - len(told))

    def facts(self, place: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, float]]:
        """The values behind the digests, by name, and the tolerances of some of them."""
        optimizers = self._optimizers
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        facts, near, self._on_device = {**place, GROUPS: sizes}, dict[str, float](), []
        seen, (_, _, elements) = self._read.here
        late = iter(seen[elements:])
        for number, optimizer in enumerate(optimizers):
            # Optimizers from outside torch may keep sums in their groups, whose order of addition differs by device.
            precision = _TORCH if type(optimizer).__module__.startswith("torch.") else _OTHER
            of = f" of optimizer {number}" if number else ""
            for index, group in enumerate(optimizer.param_groups):
                for name in _settings(optimizer, group):
                    value, field = self._plain(group.get(name)), f"{name} of parameter group {index}{of}"
                    facts[field] = next(late, None) if value is _LATE else value
                    near[field] = _ON_DEVICE if value is _LATE else precision
        return facts, near

    def _plain(self, value: Any) -> Any:
        """The value by which to compare a setting; None if it cannot be compared."""
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
        """Process the figures of all ranks' rows, (W, n). Windows come in order."""
        if told[0, 4] == told[0, 4] and (why := beside.wrong(told[:, 4:8])) is not None:  # usually NaN
            self.wrong = why
            return
        digest, late, step, key = told[:, :4].T
        together = _alike(step) and _alike(key)
        self._differ |= bool(np.isfinite(digest).all() and not _alike(digest)) or bool(together and not _alike(late))
        drawn = self._drawn
        if self._differ or not together or drawn is None or drawn.key != key[0]:
            return  # different settings explain different parameters
        worst = self._drift.look(drawn, int(step[0]), told[:, 8 : 8 + len(drawn.elements)])
        if worst is not None:
            said, certain = worst
            self.wrong, self._warning = (said, None) if certain else (None, said)

    def differ(self) -> bool:
        """Whether digests have differed since the last call."""
        differ, self._differ = self._differ, False
        return differ


class Drift:
    """How far the sampled elements differ between ranks, relative to a window's change of parameters.

    Differences count from a recent window, because rounding errors add up in a long job. So does the largest change in
    a window, because a learning rate may fall to zero. Rounding differences between devices are ignored: up to a
    multiple of an element's precision per optimizer step.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, Floats] | None = None  # key, optimizer step and elements (W, n)
        self._base: tuple[int, Floats] = 0, np.zeros(0)  # optimizer step, and differences from rank 0 (W, n)
        self._windows = self._growing = 0  # windows since then; consecutive growing ones
        self._moved = self._last = 0.0

    def look(self, drawn: DrawnElements, step: int, elements: Floats) -> tuple[str, bool] | None:
        """Compare elements (W, n) with the last window's. Returns the message and whether it is certain, or None."""
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
    """Names of the settings to compare; other entries of `group`, which a loop may keep on one rank, have no effect."""
    return [name for name in getattr(optimizer, "defaults", group) if name not in _OWN]


def draw(optimizers: Iterable[Optimizer], models: Iterable[nn.Module], turn: int) -> DrawnElements:
    """Draw elements of the `models`' parameters that `optimizers` step, by a rule that is the same on all ranks.

    turn   if there are more parameters than elements, each turn draws other parameters
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
    """Parameters, by name, that every rank holds whole and that should be equal; DDP's own list excludes others."""
    ignored = getattr(model, "parameters_to_ignore", getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, p in getattr(model, "module", model).named_parameters():
        plain = type(p) is nn.Parameter and p.layout == torch.strided and p.device.type in ("cpu", "cuda")
        if name not in ignored and plain and p.is_floating_point() and p.dtype.itemsize > 1 and p.numel():
            yield name, p


def digest_of(values: Sequence[Any]) -> float:
    """A digest of plain values, floats rounded to seven digits: 48 bits, which float64 holds exactly.

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
