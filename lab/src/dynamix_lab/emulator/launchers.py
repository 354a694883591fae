"""Launchers of ranks, such as torchrun. `dynamix emulate` refuses them, because it starts one rank on each host."""

import shlex
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from dynamix.errors import ConfigError

_PROGRAMS = {"torchrun", "mpirun", "mpiexec", "srun"}
_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def check_command(command: Sequence[str]) -> None:
    """Raise `ConfigError` without a command, and for one that starts several ranks.

    >>> check_command(["python", "-m", "dynamix.observe", "train.py"])
    >>> check_command(["torchrun", "--nproc-per-node", "3", "job.py"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dynamix.errors.ConfigError: command='torchrun' is not possible: ... leave the launcher out: write -- python job.py
    """
    if not command:
        raise ConfigError("command", "", "a command after --", "dynamix emulate demo -- python train.py")
    launcher, rest = _launcher(command)
    if launcher:
        line = shlex.join(["python", *(_script(rest) or ["train.py"])])
        fix = f"emulate starts one rank on each host, so leave the launcher out: write -- {line}"
        raise ConfigError("command", launcher, "the program of one rank", fix)


def _launcher(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The launcher before the script, also behind `env` and the like, and the words after it; "" if there is none."""
    for i, (before, word) in enumerate(pairwise(["", *command]), 1):
        if before == "-m":
            return (word if word in _MODULES else ""), command[i:]
        if word.endswith(".py"):
            break
        if (Path(before).name, word) == ("accelerate", "launch"):
            return "accelerate launch", command[i:]
        if Path(word).stem in _PROGRAMS and not before.startswith("-"):
            return Path(word).name, command[i:]
    return "", ()


def _script(words: Sequence[str]) -> Sequence[str]:
    """The script among a launcher's words, and its arguments; empty if that is not certain."""
    options = list(takewhile(lambda word: not word.endswith(".py"), words))
    return () if {"-m", "--module"} & {*options} else words[len(options) :]
