"""Inputs guided by coverage: atheris changes the bytes from which a target draws, and keeps those that reach new code.

python -m dynamix_lab.suites.fuzz.guided KIND INPUTS SEED FILE

It is a separate process because atheris ends it. FILE gets the results, as returned by `fuzz` of `suites.fuzz.run`.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from dynamix.errors import DynamixError

MODULE = "dynamix_lab.suites.fuzz.guided"
LONGEST = 2048  # bytes of an input


class Drawn(random.Random):
    """Random numbers read from `data`, bit by bit; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._bits, self._left = int.from_bytes(data, "little"), 8 * len(data)

    def getrandbits(self, k: int, /) -> int:
        """
        >>> drawn = Drawn(b"\\x05\\x01")
        >>> drawn.getrandbits(4), drawn.getrandbits(8), drawn.getrandbits(99)
        (5, 16, 0)
        """
        k = min(k, self._left)
        drawn = self._bits & ((1 << k) - 1)
        self._bits >>= k
        self._left -= k
        return drawn

    def random(self) -> float:
        return self.getrandbits(16) / 2**16


def guided(kind: str, *, inputs: int, seed: int) -> dict[str, Any]:
    """Try `inputs` of a kind in a separate process. Raises `DynamixError` if it dies, or atheris is missing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        arguments = [kind, str(inputs), str(seed), str(out)]
        done = subprocess.run([sys.executable, "-m", MODULE, *arguments], capture_output=True, text=True, check=False)
        if not out.exists():
            raise DynamixError(f"the guided fuzzer of {kind} ended with {done.returncode}: {done.stderr[-500:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main(kind: str, inputs: int, seed: int, out: Path) -> None:
    """Try the inputs. Never returns."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["dynamix", "dynamix_homomorphic"], enable_loader_override=False):
        from dynamix_lab.suites.fuzz.run import Tally
        from dynamix_lab.suites.fuzz.targets import targets
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = tempfile.TemporaryDirectory()
    target = targets(Path(folder.name))[kind]()
    tally = Tally(target)

    def one(data: bytes) -> None:
        tally.attempt(Drawn(data))
        if tally.tried == inputs:
            out.write_text(json.dumps(tally.found()))
            folder.cleanup()

    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={LONGEST}", "-rss_limit_mb=0"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
