"""Random state of this process: Python, NumPy, torch CPU and CUDA, as plain data for checkpoints."""

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of every global generator in use."""
    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    # Lists instead of arrays, so that `torch.load(weights_only=True)` takes the file.
    plain = {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": plain, "torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned (CUDA only as many devices as this process has)."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(of_numpy(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(cuda.cpu(), device)


def of_numpy(saved: dict[str, Any]) -> dict[str, Any]:
    """NumPy's state, of which `capture` keeps the key as a list."""
    return {**saved, "state": {**saved["state"], "key": np.array(saved["state"]["key"], dtype=np.uint32)}}
