"""`Controller`, the object that a training loop uses."""

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

from dynamix.errors import ConfigError, DynamixError, UsageError, WorkerLostError, nearest
from dynamix.events.background import background_log
from dynamix.policies import Policy
from dynamix.removed import NO_LEARNING, message, removed_arguments
from dynamix.runtime import connecting
from dynamix.runtime.config import OUTSIDE, UNSAID, JobConfig, job_config
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
FAR = 8  # beyond this many times a rate's batch, runs of few steps lost score with every rule
Model = TypeVar("Model", bound=nn.Module)


class Controller(Feeding, ControllerStatus):
    """Sets each worker's batch size while a job trains.

    A collective call: every rank of `process_group` constructs it with the same arguments (checked). Without a process
    group it serves one process, and adapts its batch size if `global_batch` is "adaptive".

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
                      or any `Policy` (`dynamix.policies.registry` lists all forms). Environment variables override
                      three arguments: DYNAMIX_POLICY this one, DYNAMIX_MEET `meet`, DYNAMIX_GLOBAL_BATCH
                      `global_batch`. DYNAMIX_POLICY=static turns off all adaptation
    batch_size        samples per worker and micro-batch at the start; None: 128, with a warning. A round has
                      `accumulate` micro-batches and ends with an optimizer step. `bounds`, `batch_sizes` and policies
                      count samples per round
    min_batch_size, max_batch_size   per micro-batch; one number, or one per rank; None: 1 and 8 * batch_size. If both
                      are equal for a worker, it has that many samples from the start
    global_batch      "fixed": the sum over workers stays as at the start. Only shares change, so the learning rate,
                      schedules and `len(loader)` stay correct. "adaptive": the sum changes, too, within the bounds
    min_global_batch, max_global_batch   samples per round of all workers; None: the sum at the start, and the most
                      that the workers' bounds allow
    interval          optimizer steps per window, at least a round (policies that decide per epoch ignore it). "auto":
                      windows of 1 to 20 rounds, short if workers change their speed, long if decisions would change
                      nothing (docs/design/reaction.md)
    quantum           micro-batches are multiples of this (torch.compile and cudnn then see few shapes)
    max_change        a batch size changes by at most this factor per decision
    limits            the six limits above in one object, `dynamix.Limits(max_batch_size=64)`; set each in one place
                      only
    accumulate        micro-batches per optimizer step, all of the same size; call `step()` after each of them
    micro_batch       most samples in one forward pass. A worker's share of a round is cut into pieces of this size, so
                      faster workers run more pieces. `batch_size` and its bounds then count per round. The loop asks
                      `optimizer_due` before it steps the optimizer. Not for SyncBatchNorm
    meet              "gradients": pieces accumulate, and a round has one optimizer step, with the gradient of the union
                      batch. "parameters": each worker takes an optimizer step for every piece. At the end of the round
                      the models are averaged, weighted by samples (local SGD; docs/rounds.md). Faster if an exchange
                      takes longer than a few pieces. With an adaptive global batch, the time of averaging and of pieces
                      determines the number of pieces per round. "auto": starts with gradients, and changes the mode if
                      the other promises more progress a second. In local steps each worker has an equal part of a
                      synchronous step: `batch_size` samples while the global batch is as at the start. Needs DDP
    rate_for          samples per step for which the optimizer's learning rate was tuned, such as a recipe's for one
                      worker. The rate follows `lr_rule` from there to the global batch, even if that is fixed. None:
                      the rate is correct for the global batch at the start
    lr_rule           how the learning rate follows the global batch: none, linear, sqrt, adascale. "auto": AdaScale's
                      gain with the noise counted four times; its square root for optimizers that divide by the size of
                      the gradient, such as Adam (docs/design/rates.md)
    process_group     the data-parallel group; None: the default group
    events            file to which rank 0 appends one JSON line per window. The environment variable DYNAMIX_EVENTS
                      overrides it (`dynamix compare` and `dynamix emulate` set it)
    replay            events file of an earlier run; its allocations are used instead of new decisions
    guard             watch the policy: if it does worse than the goodput rule, the rule takes over for a while (see
                      `Guard`). None: only learned policies are watched

    Raises `ConfigError` for impossible values, and `UsageError` if ranks pass different arguments.
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
                self._config = config = job_config(self.world_size, given)
                log = background_log(events) if self.rank == 0 else None
                facts.update(config.facts)
            self._job = open_job(config, self.group, facts.ranks, log)
        self.policy, self.overhead_s, self._closed = config.own_policy, 0.0, False
        # If the environment overrides `meet` with "gradients", the script's averaging options do not apply.
        self._no_averaging = config.meet == "gradients" != meet
        # For loops that never call close(). At exit no thread may be inside the store's client.
        weakref.finalize(self, self._job.ranks.leave_unclosed)
        weakref.finalize(self, self._job.end_events)
        if self.rank == 0:  # last: if warnings are errors, the other ranks notice
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

        `torch.compile`, Fabric or Accelerate may have wrapped the DDP module or the optimizer; `wrap` finds the inner
        one.

        Call it once for each model that the loop trains on these batches, each with its own optimizer (such as a
        generator and a discriminator; docs/several-models.md), and again for every further optimizer of one model. The
        noise scale is that of the model connected first.

        hook, hook_state   DDP communication hook to run after weighting (fp16, bf16, PowerSGD, your own)
        scaler             AMP's GradScaler, so that norms are measured without the loss scale
        weighting          "hook": gradients are weighted in DDP's hook or FSDP2's reduce-scatter, and the loop needs no
                           change. "loss": the loop calls `controller.weight(loss).backward()`; required for
                           SyncBatchNorm. "given": the loss already carries the weights: over a round's batches, its
                           mean over ranks is the union batch's loss (a sum over tokens, divided by all ranks' tokens
                           and multiplied by their number; a contrastive loss over all ranks' features). Checked in
                           the first windows: "hook" with losses that are weighted already or use all ranks' samples
                           ends the job with an error, and so does "given" with unweighted losses. Not checked: losses
                           of pieces, streams, batches dealt by length, and `policy="stigmergic"`
        batchnorm          DDP's buffers before each forward: "rank0" broadcasts, "weighted" averages by samples

        Raises `UsageError`, which names the reason, if the model needs weighting="loss" or already has a hook, reduces
        over other ranks than the controller's, or is not the model that the optimizer updates.
        """
        inside, optimizer = inner_model(model), inner_optimizer(optimizer)
        with self._job.ranks.setting_up():
            options = Options(hook, hook_state, scaler, weighting, batchnorm, None if self._no_averaging else averaging)
            connecting.connect(self._job, inside, optimizer, options)
        return model

    def scheduler(self, scheduler: Any, *, nominal_batch_size: int | None = None) -> SampleSchedule:
        """Drive a torch learning-rate scheduler by samples: one `scheduler.step()` per `nominal_batch_size` of them.

        Samples of all workers count; None: the global batch at the start.
        """
        with self._job.ranks.setting_up():
            return self._job.schedule(scheduler, nominal_batch_size)

    def find_limits(self, step_fn: Callable[[Any], Any], example: Any, *, margin: float = 0.1) -> list[int]:
        """Find each rank's largest micro-batch that fits in memory; no later batch is larger. Call it before training.

        Collective. `step_fn(batch)` must run the forward and backward passes of a step, without the optimizer's, on a
        batch of any size in the structure of `example`: some samples, repeated as needed. Each rank runs it alone, and
        its effects are undone. If running out of memory would kill the process, the memory of larger batches is
        predicted from smaller ones. `margin` is the part of the largest batch to leave free for the rest of training.

        Returns the caps (W,), samples per micro-batch, and puts them into `bounds`. Ranks with less memory start with
        smaller batches, and the others take over the rest. With `Controller(micro_batch=...)` caps limit each rank's
        pieces, not its share. Raises `ConfigError` on every rank if the smallest batch does not fit on one, and what
        `step_fn` raises.
        """
        with self._job.ranks.setting_up():
            return connecting.find_limits(self._job, step_fn, example, margin=margin)

    # ------------------------------------------------------------ in the loop

    def piece(self) -> AbstractContextManager[None]:
        """Around a batch's forward and backward passes: gradients are exchanged with a round's last batch only.

            for x, y in loader:
                with controller.piece():
                    loss = F.cross_entropy(model(x), y)
                    (loss / A).backward()
                if controller.optimizer_due:
                    optimizer.step()
                    optimizer.zero_grad()
                controller.step(loss=loss)

        Use it with `accumulate=A` to save the exchange of all batches but the last; otherwise it is correct but not
        needed. With `micro_batch` the loss is the mean over the piece's own samples; never divide it by the number of
        pieces.
        """
        return connecting.piece(self._job)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Removed in 0.3: raises `ConfigError`, which says what to use instead."""
        del args, kwargs
        fix = "loss.backward() in the loop; controller.find_limits(step_fn, example) finds what fits, and "
        fix += "Controller(micro_batch=...) cuts shares into pieces that do"
        raise ConfigError("backward", "controller.backward(...)", "not to call it", message(fix))

    def weight(self, loss: Tensor, *, count: float | Tensor | None = None) -> Tensor:
        """The loss times n_i*W/N; call `.backward()` on the result. For weighting on the loss side.

        A batch may have several losses, each weighted once. Every rank must make the same number of calls with `count`.

        count   divisor of this mean loss if it is not the number of samples (tokens; the sum of class weights; samples
                of another loader). One small all-reduce sums it over workers; for a batch's first call, no rank waits
                for it
        """
        job = self._job
        try:
            job.boundary.require_no("controller.weight(loss)")
            return loss if job.recorder.muted else job.loss_weight.apply(loss, job.need_source().piece(), count)
        except DynamixError as error:
            job.windows.fail(error)
            raise

    def step(self, *, loss: Any = None, logits: Any = None, target: Any = None, count: int | None = None) -> None:
        """Call once per micro-batch, after the optimizer's step (if any): measures, and every `interval` steps decides.

        loss, logits, target   measurements of this micro-batch: tensors, dicts or a model's output; may be None. Pass
                               the unweighted loss; with weighting="given" pass it as it is. What cannot be read is NaN,
                               with one warning; `dynamix.runtime.measure.readings.Reader` lists the forms
        count                  samples that the mean loss is over, if your collate can drop some; checked. Without it, a
                               batch whose inputs have fewer samples than were dealt ends the job
        Never synchronises a device. Raises `WorkerLostError` if another rank is gone.
        """
        began = time.perf_counter()
        try:
            self._job.step(loss, logits, target, count)
        except WorkerLostError:
            raise  # the other ranks have noticed the loss, too
        except DynamixError as error:
            self._job.windows.fail(error)
            raise
        self.overhead_s += time.perf_counter() - began

    def warm_up(self, forward_backward: Callable[[], Any]) -> None:
        """Run two discarded forward and backward passes, so that a resumed run sums gradients in the saved run's order.

        DDP rebuilds its buckets after the first step; without this a restarted job at W > 2 differs in the last bits.
        Collective. `forward_backward()` must run the model and `.backward()` on any batch. Buffers, gradients and
        random state are restored.
        """
        with self._job.ranks.setting_up():
            connecting.warm_up(self._job, forward_backward)

    def request_stop(self) -> None:
        """Ask all ranks to stop soon, after the same step; then `stopping` is true. May be called in a signal handler:

            signal.signal(signal.SIGTERM, lambda *_: controller.request_stop())
            for x, y in loader:
                ...
                controller.step(loss=loss)
                if controller.stopping:
                    save(model, optimizer, controller.state_dict())
                    break

        A request of one rank is enough. It takes 2 to 4 s. No step waits meanwhile, except possibly the last.
        """
        self._job.ranks.request_stop()

    # ------------------------------------------------------------ state

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """The state to resume from: call it when `checkpoint_due`. Includes the sampler and this rank's RNG.

        It has at most 1 MB at 1,024 workers. The keys are always the same, and all values are of types that
        `torch.load(weights_only=True)` and `torch.distributed.checkpoint` accept: the controller is `Stateful`. If the
        latter calls it, it is a collective call, and returns the first rank's state with every rank's own part in it.

        gather   True: a collective call; the state of every rank contains each rank's own part (its open window, and up
                 to 64 ranks its random state). For frameworks that keep only rank 0's state. Without it such a resume
                 is exact in samples and decisions, but the other ranks' measurements of the open window are unknown
        """
        return self._job.state_dict(gather=gather)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` with the state averaged over workers, weighted by their samples of the last round.

        A collective call at the end of a round with meet="parameters". Use it for checkpoints to resume at another
        world size if each worker keeps its own optimizer state (`Averaging(optimizer_state="kept")`). The optimizer
        does not change. Raises `UsageError` within a round, with meet="gradients", and for state that has no mean.
        """
        if self._no_averaging:
            return optimizer.state_dict()
        return self._job.boundary.optimizer_state(optimizer)

    def load_state_dict(self, state: dict[str, Any], *, policy: bool = True) -> None:
        """Resume from a state saved at this or another world size, before or after `batch_sampler` and `wrap`.

        At another world size the global batch is kept, and no sample is lost or repeated. A worker on a host that the
        state knows keeps its share; others begin with the mean. If rank and world size are the same, random state is
        restored, once the loader's iterator exists.

        policy   False: the policy starts fresh, and only the rest is loaded

        The whole state is checked first: raises `StateError`, and changes nothing, if it is damaged, edited, from
        another version, or does not fit this job. If your policy, hook's state or scheduler raises while it loads its
        part, the error names it, and all of them are restored.
        """
        with self._job.ranks.setting_up():
            self._job.load_state_dict(state, policy=policy)

    def close(self) -> None:
        """Finish a pending decision, write the last events, and release threads, sockets and process groups.

        The last event covers the steps after the last window, if there are any.

        Safe to call twice; call it on every rank, before `dist.destroy_process_group()`. After a rank was lost it waits
        for nothing. The connected model cannot be trained afterwards.
        """
        if not self._closed:
            self._closed = True
            self._job.boundary.warn_between()
            short = None if sys.exception() else self._job.loop.cut_short()
            self._job.close()
            if short is not None:
                raise UsageError(short)


def _warn(config: JobConfig, at_once: int, *, unsaid: bool) -> None:
    """On the first rank: warn of assumptions. `at_once`: samples of the steps that all workers take simultaneously."""
    for name in os.environ:
        if name.upper().startswith("DYNAMIX_"):
            meant = nearest(name[8:], (*OUTSIDE, "events"))
            if meant and name != (ours := f"DYNAMIX_{meant.upper()}"):
                _log.warning("dynamix: the variable %s means nothing to dynamix: did you mean %s?", name, ours)
    own = (config.meet == "parameters" and config.micro_batch) or config.batch_size * config.accumulate
    if config.rate_for is None and config.lr_rule != "none" and at_once != own:
        meant = f"the learning rate is assumed to fit steps of {at_once} samples, the sum over all workers"
        write = f"If so, write Controller(rate_for={at_once}); if it fits the samples of one worker, rate_for={own}"
        _log.warning("dynamix: %s. %s", meant, write)
    if config.rate_for is not None and at_once > FAR * config.rate_for:
        far = f"the global batch of {at_once} samples is more than {FAR} times rate_for={config.rate_for}"
        _log.warning("dynamix: %s: too few steps lower the score at any lr. Lower batch_size, or train longer", far)
    if config.shares_only:
        why = f"the policy {config.facts['policy']} only moves shares, so global_batch='adaptive' has no effect"
        fix = "Leave global_batch out, or take a policy that adapts it: goodput, dynamix or stigmergic"
        warnings.warn(f"{why}. {fix}", RuntimeWarning, stacklevel=4)
    if unsaid:
        fix = "Write Controller(batch_size=...) with the batch size that a worker has today"
        said = f"no batch_size was given, so every worker begins with {UNSAID} samples. {fix}"
        warnings.warn(said, RuntimeWarning, stacklevel=4)
