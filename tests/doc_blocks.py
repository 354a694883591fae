"""Runs the Python blocks of pages on one rank: `python tests/doc_blocks.py PAGE...`; prints what failed.

A block is run with what the page's text takes for granted: a data set, a model, an optimizer, a controller and a loader
that fit together. A block before a text block that begins with `SomeError:` must raise that, with this message.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix
from dynamix import elastic

BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RAISED = re.compile(r"([A-Z]\w+Error): (.*)", re.DOTALL)
ELSEWHERE = ("ray.train", "torchft.Manager", "LocalSGD(")
MAKES = re.compile(r"\bcontroller = |prepare\(")


class Begun:
    """torch.distributed with a process group that is there already."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name in ("init_process_group", "destroy_process_group") else getattr(dist, name)


class Texts(TensorDataset):
    """Samples of unlike length, as token lists."""

    def __init__(self) -> None:
        super().__init__(torch.randn(512, 20), torch.randint(2, (512,)))
        self.tokens = [[0] * (1 + i % 7) for i in range(len(self))]


def setting(text: str) -> dict[str, Any]:
    """Names that a block may use."""
    dataset = Texts()
    net = nn.Linear(20, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    others = [nn.Linear(20, 2), nn.Linear(20, 2)]
    named: dict[str, Any] = {
        "copy": copy, "torch": torch, "dist": Begun(), "CompressionState": dynamix.CompressionState,
        "nn": nn, "F": F, "DDP": DDP, "DataLoader": DataLoader, "np": np,
        "dynamix": dynamix, "elastic": elastic, "signal": signal, "dataset": dataset, "net": net,
        "optimizer": optimizer, "collate": None, "held_out_x": dataset.tensors[0], "held_out_y": dataset.tensors[1],
        "x": dataset.tensors[0][:8], "y": dataset.tensors[1][:8], "loss": torch.zeros(()), "save": lambda *_: None,
        "train_step": lambda x, y: None, "evaluate": lambda: 0.5, "lengths": [len(tokens) for tokens in dataset.tokens],
        "generator": others[0], "critic": others[1],
        "optimizer_g": torch.optim.SGD(others[0].parameters(), lr=0.1),
        "optimizer_d": torch.optim.SGD(others[1].parameters(), lr=0.1), "loader": [],
    }  # fmt: skip
    if not MAKES.search(text):
        controller = named["controller"] = dynamix.Controller("lb_bsp", batch_size=8)
        if "batch_sampler(" not in text:
            named["sampler"] = controller.batch_sampler(dataset)
            named["loader"] = DataLoader(dataset, batch_sampler=named["sampler"])
        with_own = "wrap(" in text or "register_comm_hook" in text
        named["model"] = DDP(net) if with_own else controller.wrap(DDP(net), optimizer)
    return named


def run(text: str, error: str | None) -> str | None:
    """What is wrong with a block; None if nothing is."""
    named = setting(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(text, "block", "exec"), named)
    except Exception as raised:
        said = f"{type(raised).__name__}: {raised}"
        if error is None or not " ".join(said.split()).startswith(" ".join(error.split())):
            return said
    else:
        return None if error is None else f"did not raise {error}"
    finally:
        close = getattr(named.get("controller"), "close", lambda: None)
        close()
    return None


def blocks(page: Path) -> Iterator[tuple[str, str | None]]:
    """Python blocks without a main program, and the error that each must raise."""
    found = BLOCK.findall(page.read_text())
    for i, (language, text) in enumerate(found):
        if language == "python" and "__main__" not in text:
            after = found[i + 1] if i + 1 < len(found) else ("", "")
            error = after[1].strip() if after[0] == "text" and RAISED.match(after[1]) else None
            yield text, error


def elsewhere(text: str) -> bool:
    """Whether the block needs Ray or torchft's server: their examples are run by tests/integrations."""
    return any(word in text for word in ELSEWHERE)


def main(pages: list[str]) -> int:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    failed, ran = [], 0
    for page in pages:
        for text, error in blocks(Path(page)):
            ast.parse(text)
            if elsewhere(text):
                continue
            torch.manual_seed(0)
            ran += 1
            if said := run(text, error):
                failed.append({"page": page, "block": text[:200], "said": said[:600]})
    dist.destroy_process_group()
    print(json.dumps({"ran": ran, "failed": failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
