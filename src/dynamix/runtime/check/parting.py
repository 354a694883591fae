"""Whether ranks still hold the same while they train: what a row says of it, and what the rows of all ranks tell.

A digest of optimizers' group settings and of the place in the data is compared exactly. Some elements of the parameters
are copied without waiting for their device, and compared as a difference over what a window moves: devices that are not
alike differ in last bits.
"""

import functools
import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.runtime.measure.recorder import ELEMENTS, HELD
from dynamix.runtime.ranks.compare import GROUPS, HOW, PLACE
from dynamix.window import Floats

_OWN = frozenset(("params", "param_names", "device", *HOW))  # of a group: what ranks may well have unlike
_PLAIN = frozenset((bool, int, float, str, type(None)))
_TORCH, _OTHER, _ON_DEVICE = 1e-9, 1e-3, 1e-5  # so near do settings count as equal: math libraries differ in last bits
_WARN, _MOST = 1e-3, 1e-2  # of what a window moves
_GROWING = 3  # windows running above `_WARN`, each above the one before
_ROUNDING = 4.0  # by so much of their precision may elements differ more after every optimizer step
_WINDOWS = 16  # after which differences are counted from anew
_REDRAW = 64  # windows after which elements are drawn again, of further parameters where there are many
_WHY = (
    "Gradients are alike on all ranks, so something else moves parameters: a layer that was unfrozen or put in after "
    "DDP was made, whose gradients DDP does not add (make DDP again after it), or code that writes into parameters or "
    "optimizers on some ranks only (write it on all)"
)

Settings = list[list[list[tuple[str, Any]]]]
"""Names and values of every group of every optimizer."""


@dataclass(frozen=True)
class Drawn:
    """Elements of parameters, and settings on the same device; what is read of them is what they hold then.

    names     of the parameters that `elements` are of
    epsilon   the relative precision of each element's type
    key       tells what was drawn; the same on ranks that drew the same
    """

    elements: list[Tensor]
    names: list[str]
    epsilon: Floats
    key: float


@dataclass(frozen=True)
class Sample:
    """What was read after `step` optimizer steps: elements, then settings from the device."""

    drawn: Drawn
    step: int
    values: list[float]

    @property
    def elements(self) -> list[float]:
        return self.values[: len(self.drawn.elements)]

    @property
    def settings(self) -> list[float]:
        return self.values[len(self.drawn.elements) :]


class Copy:
    """Values of a device on their way to the host, for which nobody waits."""

    def __init__(self, drawn: Drawn, step: int, values: Tensor) -> None:
        self.drawn, self.step = drawn, step
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> Sample | None:
        """None if they are still on their way."""
        return Sample(self.drawn, self.step, self._host.tolist()) if self._event.query() else None


class Parting:
    """One rank's part: what its rows say, and what it makes of all ranks' rows where it sees them.

    wrong    what to tell the user, where parameters have parted; None: they have not
    """

    def __init__(self) -> None:
        self.wrong: str | None = None
        self._warning: str | None = None
        self._warned = self._differ = False
        self._settings: Settings = []
        self._near: list[float] = []  # by optimizer
        self._place: Mapping[str, int] = {}
        self._groups: list[list[int]] = []  # parameters of every group of every optimizer
        self._text = ""  # of both
        self._rates: list[Tensor] = []  # settings on a device
        self._drawn: Drawn | None = None
        self._windows = self._draws = 0
        self._copy: Copy | None = None
        self._sample: Sample | None = None
        self._drift = Drift()

    # ------------------------------------------------------------ of this rank

    def row(
        self, optimizers: Sequence[Optimizer], models: Sequence[nn.Module], place: Mapping[str, int]
    ) -> list[float]:
        """What a window's row says: digests, of which step and which elements a sample is, and the elements.

        models   those whose parameters are the same on all ranks after every optimizer step
        place    counters of optimizer steps, samples and so on, by name
        """
        if self._warning is not None and not self._warned:
            self._warned = True
            warnings.warn(self._warning, RuntimeWarning, stacklevel=2)
        groups = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self._rates.clear()
        settings = [[self._of_group(group) for group in optimizer.param_groups] for optimizer in optimizers]
        if self._drawn is None or groups != self._groups or self._windows % _REDRAW == 0:
            self._drawn, self._draws = draw(optimizers, models, self._draws), self._draws + 1
        if (groups, settings) != (self._groups, self._settings):
            # Other optimizers than torch's may keep sums in their groups, which devices make in other orders.
            kinds = [type(optimizer).__module__ for optimizer in optimizers]
            self._near = [_TORCH if kind.startswith("torch.") else _OTHER for kind in kinds]
            each = zip(settings, self._near, strict=True)
            texts = [[_text(*item, near) for group in of for item in group] for of, near in each]
            self._text = f"{groups} {texts}"
        self._groups, self._settings, self._place = groups, settings, place
        self._windows += 1
        self._read(self._drawn, place[PLACE[0]])
        digest, sample, nan = digest_of(f"{self._text} {list(place.values())}"), self._sample, float("nan")
        if sample is None:
            return [digest, *[nan] * (len(HELD) - 1)]
        late, values = digest_of(_text("", tuple(sample.settings), _ON_DEVICE)), sample.elements
        return [digest, late, float(sample.step), sample.drawn.key, *values, *[nan] * (ELEMENTS - len(values))]

    def facts(self) -> tuple[dict[str, Any], dict[str, float]]:
        """What the digests of the newest row are of, plain values by name; and how near some of them must be."""
        facts: dict[str, Any] = {**self._place, GROUPS: self._groups}
        near: dict[str, float] = {}
        late = iter([] if self._sample is None else self._sample.settings)
        for number, (groups, precision) in enumerate(zip(self._settings, self._near, strict=True)):
            of = f" of optimizer {number}" if number else ""
            for index, settings in enumerate(groups):
                for name, value in settings:
                    on_device = value is _LATE
                    field = f"{name} of parameter group {index}{of}"
                    facts[field] = next(late, None) if on_device else value
                    near[field] = _ON_DEVICE if on_device else precision
        return facts, near

    def _of_group(self, group: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [
            (name, value if type(value) in _PLAIN else self._known(value))
            for name, value in group.items()
            if name not in _OWN
        ]

    def _known(self, value: Any) -> Any:
        """A plain value; None for what has none."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.device.type not in ("cpu", "cuda"):
                return None
            if value.device.type == "cpu":
                return value.item()
            self._rates.append(value.detach().reshape(()))
            return _LATE
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, (tuple, list)):
            return tuple(v if type(v) in _PLAIN else self._known(v) for v in value)
        return value if isinstance(value, (int, float)) else None

    @torch.no_grad()
    def _read(self, drawn: Drawn, step: int) -> None:
        """Copy what was drawn. On a CPU it is here at once; from a device it comes with a later row."""
        if self._copy is not None:
            arrived = self._copy.arrived()
            if arrived is None:
                return
            self._sample, self._copy = arrived, None
        device = drawn.elements[0].device if drawn.elements else None
        wanted = drawn.elements + [rate for rate in self._rates if device is None or rate.device == device]
        if not wanted:
            self._sample = None
        elif wanted[0].device.type == "cpu":
            self._sample = Sample(drawn, step, torch.stack(wanted).tolist())
        else:
            self._copy = Copy(drawn, step, torch.stack(wanted))

    # ------------------------------------------------------------ of all ranks

    def look(self, told: Floats) -> None:
        """Take what all ranks' rows say, (W, n), into account. In the order of windows."""
        digest, late, step, key = told[:, :4].T
        together = _alike(step) and _alike(key)
        known = np.isfinite(digest).all()
        self._differ |= bool(known and not _alike(digest)) or bool(together and not _alike(late))
        drawn = self._drawn
        if self._differ or not together or drawn is None or drawn.key != key[0]:
            return  # settings that differ are the reason for parameters that do
        worst = self._drift.look(drawn, int(step[0]), told[:, 4 : 4 + len(drawn.elements)])
        if worst is not None:
            self.wrong, self._warning = (worst.said, None) if worst.certain else (None, worst.said)

    def differ(self) -> bool:
        """Whether digests were not alike since this was asked last."""
        differ, self._differ = self._differ, False
        return differ


@dataclass(frozen=True)
class Parted:
    """That ranks have parted, in words; and whether it is `certain`."""

    said: str
    certain: bool


class Drift:
    """How far the sampled elements of ranks are apart, over what a window moves.

    Differences are counted from some windows ago, since a long job adds up last bits; and so is the most that a window
    has moved, since a rate may fall to nothing. What devices make of last bits is left out: so much of an element's
    precision for every optimizer step.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, Floats] | None = None  # key, optimizer step and elements (W, n)
        self._base: tuple[int, Floats] = 0, np.zeros(0)  # optimizer step, and differences from rank 0 (W, n)
        self._windows = self._growing = 0  # since then; and those that grow
        self._moved = self._last = 0.0

    def look(self, drawn: Drawn, step: int, elements: Floats) -> Parted | None:
        """Compare the elements (W, n) with those of the window before; None where nothing is wrong."""
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
        self._growing = self._growing + 1 if ratio > max(_WARN, self._last) else 0
        self._last = ratio
        if self._windows == _WINDOWS:
            self._begin(step, apart, now)
        if ratio <= _WARN:
            return None
        rank, at = np.unravel_index(int(added.argmax()), added.shape)
        what = f"{drawn.names[int(at)]} of rank {rank} differs from rank 0's by {ratio:.2g} of what a window moves"
        said = f"the ranks' parameters have come to differ by optimizer step {step}: {what}. {_WHY}"
        return Parted(said, certain=ratio > _MOST or self._growing >= _GROWING)

    def _begin(self, step: int, apart: Floats, moved: float) -> None:
        self._base, self._moved, self._windows, self._last = (step, apart), moved, 0, 0.0


@torch.no_grad()
def draw(optimizers: Iterable[Optimizer], models: Iterable[nn.Module], turn: int) -> Drawn:
    """Elements of what `optimizers` step of `models`, by a rule that is the same on all ranks.

    turn   other ones have other parameters, where there are more than elements
    """
    own = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for model in models for name, p in _whole(model) if id(p) in own]
    named = [(name, p) for name, p in named if p.device == named[0][1].device]
    elements, names, turn = [], [], turn if len(named) > ELEMENTS else 0
    for number in range(ELEMENTS if named else 0):
        name, parameter = named[(number * len(named) // ELEMENTS + turn) % len(named)]
        index = np.unravel_index(_SPREAD * (number + 1) % parameter.numel(), parameter.shape)
        elements.append(parameter.detach()[tuple(map(int, index))])
        names.append(name)
    epsilon = np.array([torch.finfo(element.dtype).eps for element in elements])
    return Drawn(elements, names, epsilon, digest_of(f"{names} {[tuple(p.shape) for _, p in named]}"))


def _whole(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters that every rank has whole and DDP adds the gradients of, by name."""
    ignored = getattr(model, "parameters_to_ignore", ())
    for name, p in getattr(model, "module", model).named_parameters():
        plain = type(p) is nn.Parameter and p.layout == torch.strided and p.device.type in ("cpu", "cuda")
        if name not in ignored and plain and p.is_floating_point() and p.dtype.itemsize > 1 and p.numel():
            yield name, p


def digest_of(text: str) -> float:
    """Of 48 bits, which float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


@functools.lru_cache(1024, typed=True)
def _text(name: str, value: Any, near: float) -> str:
    """Of a plain value, with floats to about as many digits as `near` asks for.

    >>> _text("lr", 0.1 + 1e-17, 1e-9), _text("betas", (0.9, 0.999), 1e-9)
    ('lr 0.1', 'betas 0.9 0.999')
    """
    digits = round(-math.log10(near))
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join([name, *(f"{part:.{digits}g}" if isinstance(part, float) else str(part) for part in parts)])


def _alike(values: Floats) -> bool:
    return bool((values == values[0]).all())


_SPREAD = 0x9E3779B1  # a prime near 2**32 over the golden ratio: multiples of it spread over any number of elements
_LATE = "(on its device)"
