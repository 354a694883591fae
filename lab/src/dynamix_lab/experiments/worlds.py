"""Worlds to learn in and to be judged in: a net on a mix of GPUs with a kind of optimizer.

A net's row says what its fixed and its growing cost are beside the ResNet-34-like's (`net_costs.py`). The calibrated
cifar10 rows, a ResNet's, say what GPUs are beside each other. Their product is the job; its exchange is longer by the
bytes of its gradient. Disturbances are those of training clusters, and no seed is shared with the families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dynamix_lab.simulator import Clusters, calibration, sample_family
from dynamix_lab.tasks.net_costs import net_costs
from dynamix_lab.training.curriculum import with_costs

_LIKE, _MODEL = "resnet34", "cifar10"
_SEEDS = 6_000_000
_OLD, _NEW = ("T4", "RTX2080Ti", "RTX6000"), ("V100", "A100")


@dataclass(frozen=True, slots=True)
class JobWorld:
    """What jobs of a world have in common: a `dynamix_lab.training.worlds.World`.

    net         row of `NETS`
    gpus        types that a cluster may mix
    optimizer   "sgd": what a sample teaches follows the noise scale that is measured. "adam": the critical batch is the
                share of it that was measured where no rule moves the learning rate (`ClusterEnv(lr_rule="none")`): an
                Adam-like optimizer divides gradients by their size, so that their own noise scale is not its own. Ours
    """

    name: str
    net: str
    gpus: tuple[str, ...] = (*_OLD, *_NEW)
    optimizer: str = "sgd"

    @property
    def lr_rule(self) -> str:
        """How progress follows the noise scale: `ClusterEnv`'s argument."""
        return "none" if self.optimizer == "adam" else "adascale"

    def sample(self, count: int, workers: int, seed: int, *, hardness: float = 1.0) -> Clusters:
        """`count` clusters of `workers`.

        >>> WORLDS["vgg16-new"].sample(3, 4, seed=0).shape
        (3, 4)
        """
        rng = np.random.default_rng([seed, workers, *self.name.encode()])
        under = _SEEDS + int(rng.integers(2**30))
        plain = sample_family("affine-quiet", count, workers, under)
        return with_costs(_job(self, plain, rng), rng, hardness=hardness)


WORLDS: dict[str, JobWorld] = {
    world.name: world
    for world in (
        *(JobWorld(net, net) for net in ("vgg16", "vgg19", "resnet34", "resnet50")),
        JobWorld("vgg16-old", "vgg16", gpus=_OLD),
        JobWorld("vgg16-new", "vgg16", gpus=_NEW),
        JobWorld("vgg16-adam", "vgg16", optimizer="adam"),
    )
}


def place_of(name: str) -> str:
    """The name that `dynamix_lab.training` and `dynamix policy evaluate --families` know a world by.

    >>> place_of("vgg16")
    'dynamix_lab.experiments.worlds:vgg16'
    """
    return f"{__name__}:{name}"


def _job(world: JobWorld, plain: Clusters, rng: np.random.Generator) -> Clusters:
    """The plain clusters with a job's costs, sizes and exchange."""
    count, workers = plain.shape
    mine, like = net_costs(world.net), net_costs(_LIKE)
    rows = [calibration().of(_MODEL, gpu) for gpu in world.gpus]
    # One to three types a cluster, drawn anew for each.
    kinds = np.stack([rng.choice(rng.permutation(len(rows))[: rng.integers(1, 4)], workers) for _ in range(count)])
    alpha, beta, most = (
        np.array([getattr(row, name) for row in rows])[kinds] for name in ("alpha_s", "beta_s", "batch_max")
    )
    share = np.round(np.exp(rng.uniform(np.log(32), np.log(256), (count, 1))))
    spread = np.exp(0.05 * rng.normal(size=plain.shape))
    alpha = alpha * spread * mine.alpha_s / like.alpha_s
    usual = (beta * spread * share).mean(-1) + (alpha * like.alpha_s / mine.alpha_s).mean(-1)
    beta = beta * spread * mine.beta_s / like.beta_s
    fraction = rng.uniform(0.05, 0.4, count)  # of the ResNet-34-like's step that its exchange would take
    exchange = usual * fraction / (1 - fraction) * mine.parameters / like.parameters
    return replace(
        plain,
        alpha=alpha,
        beta=beta,
        curve=None,
        memory_cap=most.astype(np.int64),
        base_batch=(share[:, 0] * workers).astype(np.int64),
        exchange_s=exchange if workers > 1 else np.zeros(count),
        noise_unit=plain.noise_unit * share[:, 0] * workers / plain.base_batch,
    )
