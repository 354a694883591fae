from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples for the same code, so a failure is the change's. DYNAMIX_SEARCH=1 draws new ones: run it now and
# then.
settings.register_profile("suite", deadline=None, derandomize=os.environ.get("DYNAMIX_SEARCH", "") in ("", "0"))
settings.load_profile("suite")


# What imports frameworks for seconds is not looked through for doctests.
collect_ignore = ["preloaded.py", "integrations/lightning_jobs.py"]


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage goes through it again, a third of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


_SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(110)
"""


@pytest.fixture
def store_server() -> Iterator[tuple[int, int]]:
    """Process id and port of a key-value store in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
