"""Several models in one loop: a generator and a discriminator, each under DDP with an optimizer of its own.

torchrun --nproc-per-node 2 examples/several_models.py

One controller, and one `wrap` for each model. Call `step()` once for each batch, whatever is trained on it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import dynamix

EPOCHS, NOISE = 3, 4


def ring(samples: int) -> Tensor:
    """Points on a circle, (samples, 2), which the generator learns to draw."""
    angle = torch.rand(samples) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(samples, 2)


def judged(logits: Tensor, *, real: bool) -> Tensor:
    """The loss of classifying these as `real`."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    dataset = TensorDataset(ring(4096))
    generator = DDP(nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2)))
    critic = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))

    controller = dynamix.Controller(policy="dynamix", batch_size=32, global_batch="fixed", interval=5)
    sampler = controller.batch_sampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)
    generator = controller.wrap(generator, optimizer_g)  # first, because the noise scale is that of the first model
    critic = controller.wrap(critic, optimizer_d)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (points,) in loader:
            fake = generator(torch.randn(len(points), NOISE))

            optimizer_d.zero_grad()
            logits = critic(torch.cat([points, fake.detach()]))
            real, drawn = logits.split(len(points))
            (judged(real, real=True) + judged(drawn, real=False)).backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            with critic.no_sync():  # the pass goes through the critic, but only the generator uses its gradient
                loss = judged(critic(fake), real=True)
                loss.backward()
            optimizer_g.step()

            controller.step(loss=loss)
        if dist.get_rank() == 0:
            radius = generator.module(torch.randn(512, NOISE)).norm(dim=1).mean().item()
            sizes = controller.batch_sizes.tolist()
            print(f"epoch {epoch}: mean radius {radius:.2f} (the ring's is 1), batch sizes {sizes}", flush=True)
    controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
