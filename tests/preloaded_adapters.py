"""What ranks under a framework would import for themselves beside the rest."""

# ruff: noqa: F401
import contextlib
import gc

import tests.preloaded

with contextlib.suppress(ImportError):
    import dynamix.integrations.accelerate
with contextlib.suppress(ImportError):
    import dynamix.integrations.fabric
    import dynamix.integrations.lightning
with contextlib.suppress(ImportError):
    import dynamix.integrations.transformers

gc.collect()
gc.freeze()
