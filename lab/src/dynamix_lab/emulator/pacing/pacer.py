"""Makes training steps take as long as on the rank's device. The real arithmetic happens within that time.

A pass is the outermost call of a module with trainable parameters, with gradients enabled, and its backward. Its work
is `fixed + per_sample * batch + per_cost * cost` device-seconds. A third of it passes at the end of forward. The rest
is spread evenly over the layers (modules with parameters of their own), in hooks on the parameters' gradients. These
run before all other hooks, so that no bucket leaves before its gradients would be ready.

Waits have absolute deadlines on a clock of device-seconds. It runs at the host's present speed, and stops while the
training thread waits for a collective, or for the buffers that DDP exchanges before a forward.

It is loaded by path in ranks that may not have dynamix: it uses only the standard library, and is handed torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "DYNAMIX_DEVICE"  # file, host, fixed_ms, per_sample_ms and per_cost_ms, one per line
CREDIT_VARIABLE = "DYNAMIX_DEVICE_CREDIT"  # 0: the time between steps hides no computing
# A host's record in the file: numbers of 8 bytes, which are read and written atomically.
SLOTS = 8
SPEED, STEPS, OVERRUNS, OVERRUN_S = range(4)
FORWARD = 1 / 3  # of a pass's work
_SLICE_S = 0.020
_LEAST_OVERRUN_S, _OVERRUN = 0.001, 0.02
_PR_SET_TIMERSLACK = 29


class DeviceClock:
    """Device-seconds since `restart`. The speed is read from the host's record; 0 means no pacing."""

    def __init__(self, record: memoryview[float]) -> None:
        self.record = record
        self.restart()

    def restart(self) -> None:
        """Restart at 0."""
        self.at, self.done = time.monotonic(), 0.0

    def advance(self) -> float:
        """Advance `done` to the present. Returns the speed."""
        now, speed = time.monotonic(), float(self.record[SPEED])
        self.done += speed * (now - self.at)
        self.at = now
        return speed

    def reach(self, due: float) -> None:
        """Sleep until `done` is `due`, in slices, because the speed may change."""
        while (speed := self.advance()) and self.done < due:
            time.sleep(min(_SLICE_S, (due - self.done) / speed))


@dataclass(eq=False)
class _Pass:
    """One forward, or forwards of several modules, before one backward."""

    work: float
    modules: set[int] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)
    begun: bool = False  # whether its backward has begun


class Pacer:
    """Paces this process. With `credit` the time since the last step or backward counts as device time."""

    def __init__(
        self,
        torch: Any,
        record: memoryview[float],
        *,
        fixed_s: float,
        per_sample_s: float,
        per_cost_s: float,
        credit: bool,
    ) -> None:
        self.told_cost: float | None = None
        self._torch, self._record, self._clock = torch, record, DeviceClock(record)
        self._fixed_s, self._per_sample_s, self._per_cost_s = fixed_s, per_sample_s, per_cost_s
        self._credit, self._credited = credit, False
        self._inside, self._still, self._thread = False, False, 0
        self._due = 0.0  # on the clock, before the current backward
        self._open: _Pass | None = None
        self._running: list[_Pass] = []  # passes of the current backward
        self._layers: set[int] = set()
        self._ready: set[int] = set()
        self._ended_s: float | None = None  # on the clock, when the last gradient was ready
        self._hooked = torch.utils.weak.WeakIdKeyDictionary()

    def install(self) -> None:
        """Intercept forward calls, optimizer steps and waits for collectives."""
        torch = self._torch
        module_class, call, graph_task = torch.nn.Module, torch.nn.Module.__call__, torch._C._current_graph_task_id

        def paced_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            # A call within backward is a checkpoint that is recomputed.
            if not self._record[SPEED] or graph_task() != -1 or not any(p.requires_grad for p in module.parameters()):
                return call(module, *args, **kwargs)
            return self._forward(call, module, args, kwargs)

        module_class.__call__ = paced_call
        optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides its name
        optimizer.register_optimizer_step_pre_hook(lambda *_: self._free())
        if torch.distributed.is_available():
            work = torch._C._distributed_c10d.Work
            work.wait = self._standing_still(work.wait)
            ddp = torch.nn.parallel.DistributedDataParallel
            ddp._sync_buffers = self._standing_still(ddp._sync_buffers)  # waits in C++, or on an event
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def _forward(self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        self._thread = threading.get_ident()
        started = self._start(module, args, kwargs)
        self._inside = True
        try:
            output = call(module, *args, **kwargs)
        finally:
            self._inside = False
        started.layers |= self._hook_layers(module)
        for tensor in self._tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin_backward(started))
        self._clock.reach(self._due)
        return output

    def _start(self, module: Any, args: Any, kwargs: Any) -> _Pass:
        """A new pass, or the open one if another module continues it (a decoder after its encoder)."""
        self._running.clear()  # left over if a backward failed
        if self._open is None or self._open.begun or id(module) in self._open.modules:
            self._open = _Pass(self._work(args, kwargs))
            self._due = FORWARD * self._open.work
            self._clock.advance()
            if self._credit and self._credited:
                # At most forward's part: time between steps, perhaps an evaluation, does not make a step late.
                self._clock.done = min(self._clock.done, self._due)
            else:
                self._clock.restart()
            self._credited = False
        self._open.modules.add(id(module))
        return self._open

    def _work(self, args: Any, kwargs: Any) -> float:
        inputs = list(self._tensors((args, kwargs)))
        batch = inputs[0].shape[0] if inputs and inputs[0].ndim else len(inputs[:1])
        cost, self.told_cost = self.told_cost, None
        if self._per_cost_s and cost is None:
            integers = (
                t for t in inputs if not (t.is_floating_point() or t.is_complex() or t.dtype == self._torch.bool)
            )
            cost = next((tensor.numel() for tensor in integers), None)
            if cost is None:
                why = "the device has per_cost_ms, and the model's input has no tensor of integers whose elements count"
                raise RuntimeError(f"{why}: call dynamix_lab.emulator.devices.batch_cost(cost) before every forward")
        return self._fixed_s + self._per_sample_s * batch + self._per_cost_s * (cost or 0.0)

    def _begin_backward(self, begun: _Pass) -> None:
        if begun.begun:
            return
        if not self._running:
            self._layers, self._ready, self._ended_s = set(), set(), None
            self._backward_work = 0.0
            self._queue(self._end_backward)
        begun.begun = True
        self._running.append(begun)
        self._layers |= begun.layers
        self._backward_work += (1 - FORWARD) * begun.work

    def _layer_ready(self, layer: int) -> None:
        """A layer's gradient is ready. The layer's first one waits."""
        if not self._running and self._open is not None and not self._open.begun:
            self._begin_backward(self._open)  # its output contained no tensor
        if self._running and layer in self._layers and layer not in self._ready:
            self._ready.add(layer)
            self._clock.reach(self._due + self._backward_work * len(self._ready) / len(self._layers))
        if self._running and len(self._ready) == len(self._layers):
            self._clock.advance()
            self._ended_s = self._clock.done

    def _end_backward(self) -> None:
        """All gradients are ready. Other work at the end of backward, such as DDP's wait, comes after this.

        Only the computing of gradients can make a step late. Other hooks on the last gradients are not the device's.
        """
        due = self._due + self._backward_work
        self._clock.reach(due)  # for layers without a gradient
        if speed := self._clock.advance():
            late_s = ((self._clock.done if self._ended_s is None else self._ended_s) - due) / speed
            self._record[STEPS] += 1
            if late_s > max(_LEAST_OVERRUN_S, _OVERRUN * due / speed):
                self._record[OVERRUNS] += 1
                self._record[OVERRUN_S] += late_s
        for ended in self._running:
            ended.begun = False
        self._running.clear()
        self._queue(self._free)

    def _free(self) -> None:
        """The device is idle from now on."""
        self._open, self._credited = None, True
        self._clock.restart()

    def _queue(self, callback: Callable[[], None]) -> None:
        self._torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _standing_still(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if self._still or threading.get_ident() != self._thread:
                return wait(*args, **kwargs)
            self._clock.advance()
            self._still = True
            try:
                return wait(*args, **kwargs)
            finally:
                self._clock.at, self._still = time.monotonic(), False

        return waiting

    def _hook_layers(self, module: Any) -> set[int]:
        """Add missing hooks. Returns the modules with trainable parameters of their own."""
        layers = set()
        for owner in module.modules():
            own = ((id(owner), parameter) for parameter in owner._parameters.values())
            for layer, parameter in itertools.chain(own, _unsharded(owner)):
                if parameter is None or not parameter.requires_grad:
                    continue
                layers.add(layer)
                if parameter not in self._hooked:
                    self._hooked[parameter] = parameter.register_hook(self._hook(layer))
        return layers

    def _hook(self, layer: int) -> Callable[[Any], None]:
        return lambda _: self._layer_ready(layer)

    def _tensors(self, value: Any) -> Iterator[Any]:
        """Every tensor in nested arguments or outputs, in order."""
        if isinstance(value, self._torch.Tensor):
            yield value
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = vars(value)
        if isinstance(value, Mapping):
            value = tuple(value.values())
        if isinstance(value, list | tuple):
            for part in value:
                yield from self._tensors(part)


def _unsharded(module: Any) -> Iterator[tuple[int, Any]]:
    """(layer, parameter) that FSDP2 gathers for computing. These get gradients, not the module's own parameters."""
    if not hasattr(module, "_get_fsdp_state"):
        return
    for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
        for sharded in group.fsdp_params:
            yield id(sharded._module_info.module), getattr(sharded, "_unsharded_param", None)


def open_record(path: str, host: int) -> memoryview[float]:
    """The record of `host`, shared with the emulation's owner."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")[host * SLOTS : (host + 1) * SLOTS]


def start(torch: Any) -> None:
    """Pace this process as its environment says. Does nothing after the emulation has ended."""
    global current
    path, host, *times_ms = os.environ[VARIABLE].split("\n")
    if not os.path.exists(path):
        return
    names = ("fixed_s", "per_sample_s", "per_cost_s")
    times = {name: float(ms) / 1e3 for name, ms in zip(names, times_ms, strict=True)}
    credit = os.environ.get(CREDIT_VARIABLE, "1") != "0"
    current = Pacer(torch, open_record(path, int(host)), credit=credit, **times)
    current.install()


current: Pacer | None = None
