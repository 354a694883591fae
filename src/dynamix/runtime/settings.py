"""The arguments of a `Controller`, kept until the job's process group exists."""

import inspect
from typing import Any

from dynamix.errors import ConfigError, spelling
from dynamix.policies import Policy
from dynamix.removed import NO_LEARNING, removed_arguments
from dynamix.runtime.config import from_outside
from dynamix.runtime.controller import Controller


class Settings:
    """Arguments for a `Controller` that is made later, once the ranks' process group exists.

    Takes the arguments of `Controller`. Leave out those that a framework knows (batch_size, accumulate, process_group):
    `bind` adds them. It can be pickled if its arguments can.

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
        # A launcher's environment variables override arguments in `Controller`; readers of settings must see the same.
        self.options = from_outside({**options, "policy": policy})
        if batch_size is not None:
            self.options["batch_size"] = batch_size

    def bind(self, **known: Any) -> Controller:
        """This rank's controller. A collective call; call it once the process group exists.

        known   arguments that the caller knows; raises `ConfigError` if the settings have another value
        """
        for name, value in known.items():
            if name in self.options and self.options[name] != value:
                given = self.options[name]
                raise ConfigError(name, given, f"{value}, as in the framework", f"leave {name} out of the settings")
        return Controller(**(known | self.options))
