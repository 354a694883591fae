"""Sequences of unlike length: weight by tokens, not by samples, with `controller.weight(loss, count=tokens)`.

torchrun --nproc-per-node 2 examples/language_model_tokens.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix

PAD = 0


def sentences(n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (n,), generator=generator)
    return [torch.randint(1, 32, (int(length),), generator=generator) for length in lengths]


def collate(batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    dataset = sentences(512)
    controller = dynamix.Controller(policy="lb_bsp", batch_size=16, interval=5)
    loader = DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset), collate_fn=collate)
    model = controller.wrap(DDP(net), optimizer, weighting="loss")
    for tokens in loader:
        target = tokens[:, 1:]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        controller.weight(loss, count=int((target != PAD).sum())).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f} after {controller.samples_seen} sequences")
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
