"""This process's random state: Python, NumPy, torch CPU and CUDA, as plain data for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dynamix.errors import StateError
from dynamix.runtime.part import Part


def capture() -> dict[str, Any]:
    """The state of every global generator in use. CUDA's are included only if CUDA is initialised."""
    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    # Lists instead of arrays, so that `torch.load(weights_only=True)` accepts the file.
    plain = {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": plain, "torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: dict[str, Any]) -> None:
    """Restore what `capture` returned; CUDA only for as many devices as this process has."""
    _put(state, random, np.random, torch.default_generator)
    if state["cuda"] and torch.cuda.is_available():
        for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(cuda.cpu(), device)


def _put(state: dict[str, Any], python: Any, numpy: Any, cpu: torch.Generator) -> None:
    """Set these generators of Python, NumPy and torch to a state."""
    (version, internal, gauss), of_numpy = state["python"], state["numpy"]
    python.setstate((version, tuple(internal), gauss))
    key = np.array(of_numpy["state"]["key"], dtype=np.uint32)  # `capture` stores a list
    numpy.set_state({**of_numpy, "state": {**of_numpy["state"], "key": key}})
    cpu.set_state(state["torch"].cpu())


class RandomState(Part):
    """The process's random state as a part. `go_on` restores a loaded state later, because iterators draw seeds."""

    name, own = "rng", True
    loaded: dict[str, Any] | None = None

    def go_on(self) -> None:
        """Restore the loaded state, once."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            restore(loaded)

    def state_dict(self) -> dict[str, Any]:
        return capture()

    def check(self, state: Any) -> None:
        """Raise `StateError` for a state that generators cannot take. None: not saved, or not for this rank."""
        if state is None:
            return
        try:
            _put(state, random.Random(), np.random.RandomState(), torch.Generator())
            if type(state["cuda"]) not in (list, tuple) or set(map(type, state["cuda"])) - {torch.Tensor}:
                raise TypeError("cuda")
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StateError(f"the controller's state holds random states that do not fit: {error}") from error

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.loaded = state
