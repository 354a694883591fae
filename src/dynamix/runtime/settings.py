"""The arguments of a `Controller`, kept until the job's process group exists."""

import inspect
from typing import Any

from dynamix.errors import ConfigError, spelling
from dynamix.policies import Policy
from dynamix.removed import NO_LEARNING, removed_arguments
from dynamix.runtime.config import from_outside
from dynamix.runtime.controller import Controller


class Settings:
    """Settings for a `Controller` that is made later, while the ranks' process group does not exist yet.

    Takes the arguments of `Controller`. Settings that a framework knows by itself (batch_size, accumulate,
    process_group) may be left out: `bind` fills them in. It can be pickled if its arguments can.

        settings = dynamix.Settings("lb_bsp", interval=5)    # before init_process_group, or in the launching process
        controller = settings.bind(batch_size=32)            # on every rank, once the process group exists

    Raises `ConfigError` for an argument that `Controller` does not have.

    >>> settings = Settings("lb_bsp", batch_size=32)
    >>> controller = settings.bind(accumulate=2)
    >>> controller.batch_sizes.tolist(), controller.accumulate
    ([64], 2)
    >>> controller.close()
    """

    @removed_arguments(learn=NO_LEARNING)
    def __init__(self, policy: str | Policy = "dynamix", batch_size: int | None = None, **options: Any) -> None:
        allowed = inspect.signature(Controller).parameters
        for name in options:
            if name not in allowed:
                raise ConfigError("argument", name, ", ".join(allowed), spelling(name, allowed))
        # What a launcher says wins in `Controller`; who asks the settings must see the same.
        self.options = from_outside({**options, "policy": policy})
        if batch_size is not None:
            self.options["batch_size"] = batch_size

    def bind(self, **known: Any) -> Controller:
        """The controller of this rank: a collective call, once the process group exists.

        known   arguments that the caller knows; raises `ConfigError` if one was given otherwise
        """
        for name, value in known.items():
            if name in self.options and self.options[name] != value:
                given = self.options[name]
                raise ConfigError(name, given, f"{value}, as in the framework", f"leave {name} out of the settings")
        return Controller(**(known | self.options))
