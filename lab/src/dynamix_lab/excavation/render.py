"""Pictures of an excavation: as text for a terminal, as an array, as a GIF."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamix.errors import ConfigError
from dynamix_lab.excavation.world import Excavation, Flags

Image = NDArray[np.uint8]
_COLOURS = {
    "rock": (70, 62, 56),
    "free": (244, 240, 232),
    "trace": (236, 112, 20),
    "nest": (214, 228, 214),
    "face": (190, 160, 120),
    "empty": (40, 96, 168),
    "laden": (150, 30, 110),
    "resting": (130, 130, 130),
}


def text(env: Excavation, world: int = 0) -> str:
    """One world: # rock, . free, : a fresh trace, o an agent, @ one with a pellet. The last line has counts.

    >>> print(text(Excavation(agents=1, seed=1)).splitlines()[-1])
    step 0: 0 pellets delivered, 0 collisions
    """
    burrow = env.burrow
    traces = env.traces_now()[_checked(env, world)]
    signs = np.where(burrow.rock, "#", np.where(traces > env.field.decay.start + 0.25 * env.typed, ":", "."))
    signs[env.place[world]] = np.where(env.carrying[world], "@", "o")
    grid = signs.reshape(burrow.height, burrow.width)
    edge = burrow.margin - 1
    lines = ["".join(line[edge : len(line) - edge]) for line in grid[edge : burrow.height - edge]]
    delivered, collisions = env.delivered[world].sum(), env.collisions[world].sum()
    return "\n".join([*lines, f"step {env.clock}: {delivered} pellets delivered, {collisions} collisions"])


def image(env: Excavation, world: int = 0, *, scale: int = 16, resting: Flags | None = None) -> Image:
    """One world (height, width, 3) at `scale` pixels per cell: traces orange, agents blue, with a pellet purple.

    resting   (B, N), the agents that are drawn grey
    """
    burrow = env.burrow
    traces = env.traces_now()[_checked(env, world)]
    decay = env.field.decay
    ceiling = max(decay.beta / max(decay.alpha, 1e-9), 1e-9)
    strength = np.clip(traces / ceiling, 0, 1)[:, None] * 0.7
    pixels = np.empty((burrow.cells, 3))
    pixels[:] = _COLOURS["free"]
    pixels[burrow.nest] = _COLOURS["nest"]
    pixels[burrow.face] = _COLOURS["face"]
    pixels = pixels * (1 - strength) + np.array(_COLOURS["trace"]) * strength
    pixels[burrow.rock] = _COLOURS["rock"]
    large = pixels.reshape(burrow.height, burrow.width, 3).repeat(scale, 0).repeat(scale, 1)
    inset = max(scale // 6, 0)
    for number, (place, carrying) in enumerate(zip(env.place[world], env.carrying[world], strict=True)):
        row, column = (scale * int(v) for v in divmod(int(place), burrow.width))
        square = large[row + inset : row + scale - inset, column + inset : column + scale - inset]
        square[:] = _COLOURS["laden" if carrying else "empty"]
        if resting is not None and resting[world, number]:
            square[:] = _COLOURS["resting"]
    return np.asarray(large, dtype=np.uint8)


def captioned(picture: Image, lines: Sequence[str]) -> Image:
    """The picture with lines of text below it. Needs pillow."""
    from PIL import Image as Pictures
    from PIL import ImageDraw, ImageFont

    font = ImageFont.load_default(size=15)
    below = Pictures.new("RGB", (picture.shape[1], 8 + 22 * len(lines)), (255, 255, 255))
    pen = ImageDraw.Draw(below)
    for number, line in enumerate(lines):
        pen.text((8, 4 + 22 * number), line, fill=(40, 40, 40), font=font)
    return np.concatenate([picture, np.asarray(below)])


def save_gif(frames: Iterable[Image], path: str | Path, *, frame_s: float = 0.1) -> None:
    """Write `image`s of one size as a GIF that repeats. Needs pillow (extra `report`)."""
    from PIL import Image as Pictures

    pictures = [Pictures.fromarray(frame).quantize(64) for frame in frames]
    if not pictures:
        raise ConfigError("frames", 0, "1 or more", "collect image(env) at some steps")
    duration_ms = round(1000 * frame_s)
    pictures[0].save(path, format="GIF", save_all=True, append_images=pictures[1:], duration=duration_ms, loop=0)


def _checked(env: Excavation, world: int) -> int:
    if not 0 <= world < env.worlds:
        raise ConfigError("world", world, f"0 to {env.worlds - 1}", "check the index")
    return world
