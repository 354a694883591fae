"""What one core of the machine at hand needs for the small nets of `dynamix_lab.tasks`: rows that simulated jobs of
them start from.

They were measured once, on one thread, by least squares of relative errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamix.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NetCosts:
    """Processor seconds of one training step on b samples: alpha_s + beta_s * b; and how many numbers are exchanged."""

    alpha_s: float
    beta_s: float
    parameters: int

    @property
    def gradient_bytes(self) -> int:
        """Of one exchange, in float32."""
        return 4 * self.parameters


NETS: dict[str, NetCosts] = {
    "vgg11": NetCosts(0.02171, 0.0002734, 227_738),
    "vgg16": NetCosts(0.01847, 0.0003539, 342_906),
    "vgg19": NetCosts(0.01831, 0.0004559, 454_138),
    "resnet34": NetCosts(0.04097, 0.0006664, 115_314),
    "resnet50": NetCosts(0.06982, 0.0011856, 257_682),
}


def net_costs(name: str) -> NetCosts:
    """A row by name. Raises `ConfigError` for a net that was not measured.

    >>> net_costs("vgg16").parameters
    342906
    """
    if name not in NETS:
        raise ConfigError("net", name, ", ".join(NETS), "take one of these")
    return NETS[name]
