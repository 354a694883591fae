"""Measures a rank's training steps without changing them: tensor hooks, autograd callbacks, optimizer hooks.

A forward pass of DDP begins and ends in `DistributedDataParallel.forward`. A hook on the output's gradient sees the
start of the backward pass and queues a callback, which autograd runs once all local gradients exist. DDP queues its own
callback, which waits for the reductions, later. So the first callback queues one more, which runs after DDP's. DDP's
reducer, communication hooks and parameters are not touched. FSDP2 gathers and reduces within both passes; these moments
are identified by its calls (`sharded`).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamix.observe import sharded
from dynamix.observe.never_fatal import never_fatal
from dynamix.observe.recorder import BACKWARD, BETWEEN, EXCHANGE, FORWARD, StepRecorder
from dynamix.startup.sitecustomize import after_import

FLUSH_S = 2.0
FOLDER_VARIABLE = "DYNAMIX_OBSERVE"  # names the folder for a rank's steps
CALLED = "dynamix.observe.hooks:start"  # called by `dynamix.startup` with torch
MOST_VARIABLE = "DYNAMIX_OBSERVE_STEPS"  # limits the number of observed steps
MOST_STEPS = 200_000
_IDLE, _FORWARD, _BACKWARD, _AFTER = range(4)  # _AFTER: between a backward pass and the end of the step


class Observer:
    """Marks this process's steps and writes them to `folder`. One per process, made when torch is imported."""

    def __init__(self, torch: Any, folder: str, most_steps: int = MOST_STEPS) -> None:
        self.torch, self.folder, self.most_steps = torch, folder, most_steps
        self.recorder: StepRecorder | None = None
        self.on = True
        self._file: Any = None
        self._links: Any = None
        self._state = _IDLE
        self._began_s, self._flushed_s = 0.0, 0.0
        self._note = ""
        self._on_gradient, self._gradients_there, self._reduced = (
            never_fatal(self, hook) for hook in (self._backward_begins, self._at_last_gradient, self._at_reduced)
        )

    # -- called by the hooks

    def forward_begins(self, stack: str, module: Any, args: Any, kwargs: Any) -> bool:
        """Whether this is a training pass: then `forward_ended` is called with its output."""
        if not self.on or not self.torch.is_grad_enabled() or not module.training:
            return False
        if self.recorder is None:
            self._begin(stack, module)
        assert self.recorder is not None
        if self._state == _FORWARD:  # several passes before one backward
            return True
        self.recorder.mark(BETWEEN)
        self.recorder.passed(self._samples(args, kwargs))
        self._state = _FORWARD
        return True

    def forward_ended(self, output: Any) -> None:
        """Register hooks for the output's gradient."""
        seen = False
        for tensor in (output,) if isinstance(output, self.torch.Tensor) else self._tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_gradient)
                seen = True
        if not seen and not self._note:
            self._note = "the model's output shows no tensor with a gradient: its backward pass is not told apart"

    def _backward_begins(self, _: Any) -> None:
        """Called when a gradient reaches the model's output."""
        if self._state == _FORWARD and self.on and self.recorder is not None:
            self.recorder.mark(FORWARD)
            self._state = _BACKWARD
            self.queue(self._gradients_there)

    def waits(self) -> Callable[[], None] | None:
        """Called before buffers or shards cross ranks; call the result afterwards. None if no pass is running."""
        if self._state not in (_FORWARD, _BACKWARD) or not self.on or self.recorder is None:
            return None
        self.recorder.mark(FORWARD if self._state == _FORWARD else BACKWARD)
        return never_fatal(self, functools.partial(self.recorder.mark, EXCHANGE))

    def loaded(self, seconds: float) -> None:
        """Record seconds spent waiting for a loader."""
        if self.recorder is not None and self._state in (_IDLE, _AFTER):
            self.recorder.loaded(seconds)

    def before_update(self) -> None:
        """Called when an optimizer's step begins."""
        if self._state in (_FORWARD, _BACKWARD) and self.recorder is not None:
            # The backward pass was not seen, or ran in another way; either way it is over.
            self.recorder.mark(FORWARD if self._state == _FORWARD else BACKWARD)
            self._state = _AFTER

    def updated(self) -> None:
        """Called when an optimizer's step ends."""
        recorder = self.recorder
        if recorder is None or not self.on or not recorder.passes:
            return
        self._state = _IDLE
        now = time.monotonic()
        recorder.close(now - self._began_s)
        if now - self._flushed_s >= FLUSH_S:
            self._flushed_s = now
            self.flush()
        if recorder.steps >= self.most_steps:
            self._note = self._note or f"only the first {self.most_steps} steps were observed"
            self.stop()

    def _at_last_gradient(self) -> None:
        """Called when all local gradients exist; DDP's own callback, which waits for other ranks, runs after this."""
        self.mark_of_backward(BACKWARD)
        self.queue(self._reduced)

    def _at_reduced(self) -> None:
        self.mark_of_backward(EXCHANGE)
        self._state = _AFTER

    def mark_of_backward(self, part: int) -> None:
        """Mark the time since the last mark as `part` of the current backward pass."""
        if self._state == _BACKWARD and self.recorder is not None:
            self.recorder.mark(part)

    def queue(self, callback: Callable[[], None]) -> None:
        """Let autograd call it at the end of the current backward pass, after callbacks queued earlier."""
        self.torch.autograd.Variable._execution_engine.queue_callback(callback)

    # -- the rank's file

    def _begin(self, stack: str, module: Any) -> None:
        from dynamix.observe.links import Links
        from dynamix.observe.rank_file import RankFile
        from dynamix.probes.timing import CpuClock, CudaClock

        distributed = self.torch.distributed
        there = distributed.is_available() and distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if there else (0, 1)
        device = next((p.device for p in module.parameters()), self.torch.device("cpu"))
        self.recorder = StepRecorder(CudaClock(device) if device.type == "cuda" else CpuClock())
        self._links = Links()
        facts = {"world": world, "stack": stack, "device": device.type, "torch": self.torch.__version__}
        # Each controller of several ranks has this thread. A script that only imports dynamix has none.
        controller = any(thread.name == "dynamix-beat" for thread in threading.enumerate())
        facts |= {"controller": controller, "host": socket.gethostname(), "gpus": gpus(module)}
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._file = RankFile(Path(self.folder) / "ranks" / attempt, rank, {**facts, "started": time.time()})
        self._began_s = self._flushed_s = time.monotonic()
        self._file.write(self.recorder.take(), ended=False)
        atexit.register(self.stop)

    def flush(self, *, ended: bool = False) -> None:
        """Write the rows so far."""
        if self.recorder is not None and self._file is not None:
            self._links.sample()
            self._file.write(self.recorder.take(), ended=ended, links=self._links.told, note=self._note)

    def stop(self) -> None:
        """Write the last rows and stop observing."""
        if self.on:
            self.on = False
            self.flush(ended=True)
            if self._file is not None:
                self._file.close()

    def forked(self) -> None:
        """Called in a child after a fork: the parent's observations stay with the parent."""
        self.recorder, self._file, self._state = None, None, _IDLE

    # -- inputs and outputs

    def _samples(self, args: Any, kwargs: Any) -> float:
        """The first dimension of the first input that has one; NaN if no input has."""
        first = args[0] if args else None
        if isinstance(first, self.torch.Tensor) and first.ndim:
            return float(first.shape[0])
        for tensor in self._tensors((args, kwargs)):
            if tensor.ndim:
                return float(tensor.shape[0])
        return float("nan")

    def _tensors(self, value: Any) -> Iterator[Any]:
        """Every tensor in nested arguments or outputs, in order."""
        if isinstance(value, self.torch.Tensor):
            yield value
            return
        kind = type(value)
        if fields := getattr(kind, "__dataclass_fields__", None) or getattr(kind, "__attrs_attrs__", ()):
            value = tuple(getattr(value, getattr(field, "name", field), None) for field in fields)
        if isinstance(value, Mapping):
            value = tuple(value.values())
        if isinstance(value, list | tuple):
            for part in value:
                yield from self._tensors(part)


def gpus(model: Any) -> str:
    """The model's GPUs as the value of CUDA_VISIBLE_DEVICES that gives a process these; empty without any."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    used = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
    return ",".join(named[at] if at < len(named) and named[at] else str(at) for at in used)


watch: Observer | None = None  # of this process


def start(torch: Any, folder: str | None = None) -> Observer:
    """Observe this process from now on, to `folder`; None: the one that the environment names.

    If torch lacks a hook, only observing ends.
    """
    global watch
    try:
        most = int(os.environ.get(MOST_VARIABLE, MOST_STEPS))
    except ValueError:
        print(f"dynamix observe: {MOST_VARIABLE} is no whole number; {MOST_STEPS} is taken", file=sys.stderr)
        most = MOST_STEPS
    watch = Observer(torch, folder or os.environ[FOLDER_VARIABLE], most)
    os.register_at_fork(after_in_child=watch.forked)
    never_fatal(watch, distributed_data_parallel)(torch, watch)
    never_fatal(watch, optimizers)(torch, watch)
    after_import("torch.utils.data.dataloader", never_fatal(watch, functools.partial(loaders, watch=watch)))
    never_fatal(watch, sharded.install)(watch)
    return watch


def distributed_data_parallel(torch: Any, watch: Observer) -> None:
    """Hooks the passes of `DistributedDataParallel`, and its exchange of buffers."""
    if not torch.distributed.is_available():
        return
    ddp = torch.nn.parallel.DistributedDataParallel
    sync_buffers = ddp._sync_buffers
    begins, ended, waits = (never_fatal(watch, f) for f in (watch.forward_begins, watch.forward_ended, watch.waits))

    def observed(call: Any, wrapper: Callable[[Any], Any]) -> Any:
        """`call`, a method whose object's `wrapper` makes its calls passes if that is DDP."""

        @functools.wraps(call)
        def observed_pass(self: Any, *args: Any, **kwargs: Any) -> Any:
            within = None if torch.compiler.is_compiling() else wrapper(self)
            if not isinstance(within, ddp) or not begins("DDP", within, args, kwargs):
                return call(self, *args, **kwargs)
            output = call(self, *args, **kwargs)
            ended(output)
            return output

        return observed_pass

    @functools.wraps(sync_buffers)
    def observed_buffers(self: Any) -> None:
        over = waits()
        sync_buffers(self)
        if over is not None:
            over()

    ddp.forward, ddp._sync_buffers = observed(ddp.forward, lambda model: model), observed_buffers

    def compiled(module: Any) -> None:
        """Hooks `torch.compile(DDP(...))`, which traces DDP's forward: the compiled module's calls are the passes."""
        outer = module.OptimizedModule
        outer.__call__ = observed(outer.__call__, lambda model: model._orig_mod)

    after_import("torch._dynamo.eval_frame", never_fatal(watch, compiled))


def optimizers(torch: Any, watch: Observer) -> None:
    """Hooks the steps of all torch optimizers."""
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides its name

    def unless_compiling(method: Callable[[], None]) -> Callable[..., None]:
        hook = never_fatal(watch, method)

        def call(*_: Any) -> None:  # torch allows it to return nothing else
            if not torch.compiler.is_compiling():
                hook()

        return call

    module.register_optimizer_step_pre_hook(unless_compiling(watch.before_update))
    module.register_optimizer_step_post_hook(unless_compiling(watch.updated))


def loaders(module: Any, watch: Observer) -> None:
    """Hooks all `DataLoader`s to time the waits for them."""
    iterator = module._BaseDataLoaderIter
    following = iterator.__next__
    loaded = never_fatal(watch, watch.loaded)

    @functools.wraps(following)
    def observed_next(self: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return following(self)
        finally:
            loaded(time.perf_counter() - began_s)

    iterator.__next__ = observed_next
