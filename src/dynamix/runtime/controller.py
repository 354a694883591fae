"""`Controller`: what a training loop holds."""

import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.errors import ConfigError, DynamixError, UsageError, WorkerLostError
from dynamix.events.background import background_log
from dynamix.policies import Policy
from dynamix.removed import NO_LEARNING, message, removed_arguments
from dynamix.runtime import connecting
from dynamix.runtime.config import UNSAID, JobConfig, from_outside
from dynamix.runtime.feeding import Feeding
from dynamix.runtime.job import open_job
from dynamix.runtime.limits import Limits
from dynamix.runtime.ranks.opening import one_for_all, rank_in, require_no_launcher
from dynamix.runtime.ranks.store import store_is_there
from dynamix.runtime.rate.scaling import SampleSchedule
from dynamix.runtime.status import ControllerStatus
from dynamix.runtime.sync.parameter_averaging import Averaging
from dynamix.runtime.sync.sync import Options
from dynamix.runtime.sync.unwrapping import inner_model, inner_optimizer

_log = logging.getLogger("dynamix")
FAR = 8  # times the batch of a rate, beyond which runs of few steps have lost score with every rule
Model = TypeVar("Model", bound=nn.Module)


class Controller(Feeding, ControllerStatus):
    """Gives every worker its own batch size while a job trains.

    A collective call: every rank of `process_group` constructs it with the same arguments (checked). If no process
    group is initialised, it serves one process, and adapts its batch size if `global_batch` is "adaptive".

        controller = dynamix.Controller(policy="dynamix", batch_size=128)
        sampler = controller.batch_sampler(dataset, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        model = controller.wrap(DDP(net), optimizer)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in loader:
                logits = model(x); loss = F.cross_entropy(logits, y)
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                controller.step(loss=loss, logits=logits, target=y)

    policy            a name (`dynamix.policies.policy_names()`), a `.safetensors` policy file, your own "module:Class",
                      or any `Policy` (`dynamix.policies.registry` has all forms). The environment variable
                      DYNAMIX_POLICY, where it is set, wins over it, DYNAMIX_MEET over `meet`, and
                      DYNAMIX_GLOBAL_BATCH over `global_batch`. DYNAMIX_POLICY=static turns off all that moves
    batch_size        samples per worker and micro-batch at the start; None: 128, with a warning. A round, what lies
                      between two optimizer steps, has `accumulate` of them: `bounds`, `batch_sizes` and policies count
                      samples per round
    min_batch_size, max_batch_size   per micro-batch; one number, or one per rank; None: 1 and 8 * batch_size. A worker
                      for which both are one number has that many from the start on
    global_batch      "fixed": the sum over workers stays what it is at the start, so the learning rate, schedules and
                      `len(loader)` stay true, and only the shares move. "adaptive": it moves too, within the bounds
    min_global_batch, max_global_batch   samples per round of all workers; None: what it is at the start, and what the
                      workers' bounds allow
    interval          optimizer steps per window, at least a round (policies that decide per epoch ignore it). "auto":
                      windows of 1 to 20 rounds, short where workers change their speed, long where decisions would
                      change nothing (docs/design/reaction.md)
    quantum           micro-batches are multiples of this (torch.compile and cudnn then see few shapes)
    max_change        a batch size changes by at most this factor per decision
    limits            the six above as one value, `dynamix.Limits(max_batch_size=64)`; each is said in one place only
    accumulate        micro-batches per optimizer step, all of a size; call `step()` after each of them
    micro_batch       most samples that pass through the model at once. A worker's share of a round is then cut into
                      pieces of that many, so that workers have unlike numbers of like pieces: `batch_size` and its
                      bounds are of a round. The loop asks `optimizer_due` before it steps the optimizer. Not for
                      SyncBatchNorm
    meet              "gradients": pieces accumulate, and a round has one optimizer step, of the union batch's gradient.
                      "parameters": every piece is an optimizer step of its worker's own, and at the end of the round
                      the workers' models become their mean by samples (local SGD; docs/rounds.md). Faster where
                      exchange takes longer than a few pieces. With an adaptive global batch the number of pieces until
                      a meeting follows from what meetings and pieces take. "auto": begins with gradients, and goes over
                      to the other way and back, where that promises more progress a second. Apart, an optimizer step
                      has a worker's even part of a step over gradients: `batch_size` samples, as long as the global
                      batch is what it was at the start. Needs DDP
    rate_for          samples of a step that the optimizer's rate is meant for: the batch of a recipe for one worker.
                      The rate then follows `lr_rule` from there to the global batch, also where that is fixed. None:
                      it is meant for the global batch at the start
    lr_rule           how the learning rate follows the global batch: none, linear, sqrt, adascale. "auto": the gain of
                      AdaScale with the noise counted four times; for Adam and others that divide by the size of the
                      gradient its root (docs/design/rates.md)
    process_group     the data-parallel group; None: the default group
    events            file that rank 0 appends one JSON line per window to; by default the one that the environment
                      variable DYNAMIX_EVENTS names (`dynamix emulate` sets it), if any
    replay            events file of an earlier run whose allocations are applied instead of deciding
    guard             watch the policy: where it does worse than the goodput rule, that takes over for a while (see
                      `Guard`). None: learned policies are watched, others are not

    Raises `ConfigError` for impossible values, `UsageError` when ranks pass different arguments.
    """

    @removed_arguments(learn=NO_LEARNING)
    def __init__(
        self,
        policy: str | Policy = "dynamix",
        batch_size: int | None = None,
        *,
        global_batch: Literal["fixed", "adaptive"] = "fixed",
        min_batch_size: int | Sequence[int] | None = None,
        max_batch_size: int | Sequence[int] | None = None,
        min_global_batch: int | None = None,
        max_global_batch: int | None = None,
        interval: int | Literal["auto"] = 5,
        quantum: int = 1,
        max_change: float = float("inf"),
        limits: Limits | None = None,
        accumulate: int = 1,
        micro_batch: int | None = None,
        meet: Literal["gradients", "parameters", "auto"] = "gradients",
        lr_rule: str = "auto",
        rate_for: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        events: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
        guard: bool | None = None,
    ) -> None:
        together = dist.is_available() and dist.is_initialized()
        if not together:
            require_no_launcher()
        self.group = (process_group or dist.group.WORLD) if together else None
        self.rank = rank_in(self.group)
        self.world_size = dist.get_world_size(self.group) if self.group else 1
        self.interval, self.accumulate, self.lr_rule = interval, accumulate, lr_rule
        unsaid, batch_size = batch_size is None, UNSAID if batch_size is None else batch_size
        named = Limits(min_batch_size, max_batch_size, min_global_batch, max_global_batch, quantum, max_change)
        with store_is_there():
            with one_for_all(self.group) as facts:
                within = named if limits is None else named.beside(limits)
                given: dict[str, Any] = {"policy": policy, "batch_size": batch_size, "limits": within, "meet": meet}
                given |= {"global_batch": global_batch, "micro_batch": micro_batch, "accumulate": accumulate}
                given |= {"lr_rule": lr_rule, "rate_for": rate_for, "replay": replay, "guard": guard}
                given["interval"] = interval
                self._config = config = JobConfig(self.world_size, **from_outside(given))
                log = background_log(events) if self.rank == 0 else None
                facts.update(config.facts)
            self._job = open_job(config, self.group, facts.ranks, log)
        self.policy, self.overhead_s, self._closed = config.own_policy, 0.0, False
        # The script's words on averaging models are not used, where it was told from outside to meet over gradients.
        self._no_averaging = config.meet == "gradients" != meet
        # For loops that do not close it. The end of this process must find no thread inside the store's client.
        weakref.finalize(self, self._job.ranks.leave_unclosed)
        weakref.finalize(self, self._job.end_events)
        if self.rank == 0:  # last: where warnings are errors, the other ranks notice
            _warn(config, self._job.facts.at_once, unsaid=unsaid)

    # ------------------------------------------------------------ setting up

    def wrap(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        hook: Callable[[Any, Any], Any] | None = None,
        hook_state: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        weighting: Literal["hook", "loss", "given"] = "hook",
        batchnorm: Literal["rank0", "weighted"] = "rank0",
        averaging: Averaging | None = None,
    ) -> Model:
        """Connect a model and its optimizer; returns the same model. Call it after DDP or `fully_shard`.

        A DDP module or an optimizer may be wrapped by `torch.compile`, Fabric or Accelerate: the wrapper is looked
        through.

        Once for each model that the loop trains on these batches, each with an optimizer of its own (a generator and a
        discriminator, say; docs/several-models.md), and once more for every further optimizer of one model. The noise
        scale, and the gradient that `backward` makes, are those of the model that was connected first.

        hook, hook_state   DDP communication hook to run after weighting (fp16, bf16, PowerSGD, your own)
        scaler             AMP's GradScaler, so that norms are measured without the loss scale
        weighting          "hook": gradients are weighted in DDP's hook or FSDP2's reduce-scatter, and the loop stays
                           as it is. "loss": the loop calls `controller.weight(loss).backward()`; required for
                           SyncBatchNorm. "given": the loss carries them already: over a round's batches, its
                           mean over ranks is the union's (a sum over tokens, divided by the tokens of all ranks and
                           times their number; a contrastive loss over the features of all ranks). The first windows
                           show whether losses do what this says: "hook" with losses that carry weights or are made
                           of all ranks' samples, and "given" without, end the job with an error. Not seen are
                           losses of pieces, streams, batches dealt by length, and under `policy="stigmergic"`
        batchnorm          DDP's buffers before each forward: "rank0" broadcasts, "weighted" averages by samples

        Raises `UsageError` naming the reason when the model needs the loss side or already has a hook, reduces over
        other ranks than the controller's, or is not the one that the optimizer updates.
        """
        inside, optimizer = inner_model(model), inner_optimizer(optimizer)
        with self._job.ranks.setting_up():
            how = None if self._no_averaging else averaging
            options = Options(hook, hook_state, scaler, weighting, batchnorm, how)
            connecting.connect(self._job, inside, optimizer, options)
        return model

    def scheduler(self, scheduler: Any, *, nominal_batch_size: int | None = None) -> SampleSchedule:
        """Drive a torch learning-rate scheduler by samples: one `scheduler.step()` per nominal_batch_size of them.

        They are global samples; None: the global batch at the start.
        """
        with self._job.ranks.setting_up():
            return self._job.schedule(scheduler, nominal_batch_size)

    def find_limits(self, step_fn: Callable[[Any], Any], example: Any, *, margin: float = 0.1) -> list[int]:
        """Find the largest micro-batch that fits each rank's memory; from then on no batch is larger. Before training.

        Collective. `step_fn(batch)` must run the forward and backward passes of a step, without the optimizer's, on a
        batch of any size in the structure of `example`: some samples, repeated as needed. It runs on no rank together
        with another and leaves no trace. If running out of memory would kill the process, the needs of larger batches
        are predicted from smaller ones. `margin` is the part of the largest that is left free, for what training does
        besides.

        Returns the caps (W,), samples per micro-batch, which are in `bounds` now; ranks that can hold less begin with
        less, the others take over. With `Controller(micro_batch=...)` they bound each rank's pieces, not its share.
        Raises `ConfigError` on every rank when the smallest batch does not fit one, and what `step_fn` raises.
        """
        with self._job.ranks.setting_up():
            return connecting.find_limits(self._job, step_fn, example, margin=margin)

    # ------------------------------------------------------------ in the loop

    def piece(self) -> AbstractContextManager[None]:
        """Around the forward and backward passes of a batch: gradients cross ranks with a round's last batch only.

            for x, y in loader:
                with controller.piece():
                    loss = F.cross_entropy(model(x), y)
                    (loss / A).backward()
                if controller.optimizer_due:
                    optimizer.step()
                    optimizer.zero_grad()
                controller.step(loss=loss)

        For `accumulate=A`, where the exchange of every batch but the last is saved; right, and not needed, otherwise.
        If `micro_batch` is given, the loss is the mean over the piece's own samples, and is never divided by their
        number.
        """
        return connecting.piece(self._job)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Removed in 0.3: raises `ConfigError`, which says what to write."""
        del args, kwargs
        fix = "loss.backward() in the loop; controller.find_limits(step_fn, example) finds what fits, and "
        fix += "Controller(micro_batch=...) cuts shares into pieces that do"
        raise ConfigError("backward", "controller.backward(...)", "not to call it", message(fix))

    def weight(self, loss: Tensor, *, count: float | Tensor | None = None) -> Tensor:
        """The loss times n_i*W/N, to call `.backward()` on: weighting on the loss side.

        A batch may have several losses, each weighted once. Every rank makes as many calls with a `count`.

        count   divisor of this mean loss if it is not the number of samples (tokens; the sum of class weights; samples
                of another loader). It is summed over workers by one small all-reduce, for which nobody waits if it is
                the batch's first
        """
        job = self._job
        try:
            job.boundary.require_no("controller.weight(loss)")
            piece = job.need_source().piece()
            return loss if job.recorder.muted else job.loss_weight.apply(loss, piece, count)
        except DynamixError as error:
            job.windows.fail(error)
            raise

    def step(self, *, loss: Any = None, logits: Any = None, target: Any = None, count: int | None = None) -> None:
        """Once per micro-batch, after the optimizer's step (if any): observe; every k steps decide.

        loss, logits, target   of this micro-batch, as observations: tensors, dicts or a model's output; may be None.
                               The loss unweighted, or as it is with weighting="given". What cannot be read is unknown
                               (NaN), with one warning; the forms are in `dynamix.runtime.measure.readings.Reader`
        count                  samples that the mean loss is over, if your collate can drop some: checked. Without it a
                               batch whose inputs are fewer samples than were dealt ends the job
        Never synchronises a device. Raises `WorkerLostError` when another rank is gone.
        """
        began = time.perf_counter()
        try:
            self._job.step(loss, logits, target, count)
        except WorkerLostError:
            raise  # the others have lost it too
        except DynamixError as error:
            self._job.windows.fail(error)
            raise
        self.overhead_s += time.perf_counter() - began

    def warm_up(self, forward_backward: Callable[[], Any]) -> None:
        """Two discarded forward and backward passes, so that a resumed run sums gradients in the saved run's order.

        DDP rebuilds its buckets after the first step; without this a restarted job at W > 2 differs in the last bits.
        Collective. `forward_backward()` must run the model and `.backward()` on any batch. Buffers, gradients and
        random state are put back.
        """
        with self._job.ranks.setting_up():
            connecting.warm_up(self._job, forward_backward)

    def request_stop(self) -> None:
        """Ask all ranks to stop after the same step, soon; `stopping` says when. May be called in a signal handler:

            signal.signal(signal.SIGTERM, lambda *_: controller.request_stop())
            for x, y in loader:
                ...
                controller.step(loss=loss)
                if controller.stopping:
                    save(model, optimizer, controller.state_dict())
                    break

        One rank's request is enough. It takes 2 to 4 s, and no step waits meanwhile but perhaps the last.
        """
        self._job.ranks.request_stop()

    # ------------------------------------------------------------ state

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Everything to go on from here: call it where `checkpoint_due`. Includes the sampler and this rank's RNG.

        It has at most 1 MB at 1,024 workers. The keys are always the same, and all values are what
        `torch.load(weights_only=True)` and `torch.distributed.checkpoint` take: the controller is `Stateful`. Asked by
        the latter, it gives the first rank's state with every rank's own part in it, by a collective call.

        gather   True: a collective call; each rank's own part (its open window, and up to 64 ranks its random state)
                 is in the state of every rank. For frameworks that keep rank 0's state only. Without it such a resume
                 is exact in samples and decisions, but the other ranks' figures of the open window are unknown.
        """
        return self._job.state_dict(gather=gather)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` with the mean over workers of what it remembers, by their samples of the last round.

        A collective call at a meeting over parameters, for checkpoints that go on at another world size where each
        worker keeps its own (`Averaging(optimizer_state="kept")`). The optimizer stays as it is. Raises `UsageError`
        between meetings, with meet="gradients", and for what has no mean.
        """
        if self._no_averaging:
            return optimizer.state_dict()
        return self._job.boundary.optimizer_state(optimizer)

    def load_state_dict(self, state: dict[str, Any], *, policy: bool = True) -> None:
        """Go on from a state saved by this or another world size, before or after `batch_sampler` and `wrap`.

        At another world size the global batch is kept and split evenly; no sample is lost or repeated. Random state is
        restored where rank and world size are the same, once the loader's iterator exists.

        policy   False: the policy begins anew, and only the rest is taken

        The state is checked as a whole first: raises `StateError`, and changes nothing, where it is damaged, was
        changed, is of another version or does not fit this job. If your policy, hook's state or scheduler raises while
        it loads its part, the error names it, and all are put back as they were.
        """
        with self._job.ranks.setting_up():
            self._job.load_state_dict(state, policy=policy)

    def close(self) -> None:
        """Finish a pending decision, write the last events, and let go of threads, sockets and process groups.

        The last event is of the steps after the last window, where there are any.

        Safe to call twice; every rank should call it, before `dist.destroy_process_group()`. Nothing is waited for
        after a rank was lost. The connected model cannot be trained on after it.
        """
        if not self._closed:
            self._closed = True
            self._job.boundary.warn_between()
            short = None if sys.exception() else self._job.loop.cut_short()
            self._job.close()
            if short is not None:
                raise UsageError(short)


def _warn(config: JobConfig, at_once: int, *, unsaid: bool) -> None:
    """On the first rank: what was assumed. `at_once`: samples of the steps that all workers take at the same time."""
    own = config.micro_batch if config.meet == "parameters" and config.micro_batch else config.batch_size
    if config.rate_for is None and config.lr_rule != "none" and at_once != own:
        meant = f"the learning rate is assumed to fit steps of {at_once} samples, the sum over all workers"
        write = f"Controller(rate_for={own})"
        _log.warning("dynamix: %s. If you tuned it with another batch, such as one worker's, write %s", meant, write)
    if config.rate_for is not None and at_once > FAR * config.rate_for:
        far = f"the global batch of {at_once} samples is more than {FAR} times rate_for={config.rate_for}"
        _log.warning("dynamix: %s: if training then has few steps, no learning rate replaces the missing ones", far)
    if config.shares_only:
        name = config.facts["policy"]
        why = f"the policy {name} only moves shares between workers, so global_batch='adaptive' has no effect"
        fix = "Leave global_batch out, or take a policy that adapts it: goodput, dynamix or stigmergic"
        warnings.warn(f"{why}. {fix}", RuntimeWarning, stacklevel=4)
    if unsaid:
        fix = "Write Controller(batch_size=...) with the batch size that a worker has today"
        said = f"no batch_size was given, so every worker begins with {UNSAID} samples. {fix}"
        warnings.warn(said, RuntimeWarning, stacklevel=4)
