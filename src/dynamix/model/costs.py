"""Each worker's fixed cost and cost per sample, learned online while its speed jumps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dynamix.model.measured import base_total, busy_seconds, mean_of_known, median_of_known
from dynamix.model.state import laid_out, merged, nothing, restored
from dynamix.window import Floats, Ints, Window

# Candidate fixed costs of a worker, as multiples of the time for the samples of its base batch. Their prior is
# 1 / (1 + offset / PRIOR): small ones are commoner, also among the calibrated GPUs.
OFFSETS: Floats = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 5.0, 8.0, 16.0])
PRIOR = 2.0
# Beyond a memory cliff time grows faster than the batch.
POWERS: Floats = np.array([1.5, 2.0])
PLAIN = len(OFFSETS)

# Prior chance that what looks like a jump is one. It falls as soon as jumps turn out not to last.
LASTING = 0.9

NO_LEAN: Floats = np.zeros(1)


class Reading(NamedTuple):
    """One window's measurement of every worker, (..., W); 1 s if `seen` is false.

    seconds  busy seconds of a step; `own` their relative variance within the window, `steps` (..., 1) its steps
    size     log samples, of mean cost if costs are known
    level    (..., W, G) the level at which each candidate would be right
    """

    seen: np.ndarray
    seconds: Floats
    own: Floats
    steps: Floats
    size: Floats
    samples: Floats  # (..., W, G) and their log
    logs: Floats
    level: Floats

    @classmethod
    def of(cls, window: Window, seen: np.ndarray) -> Reading:
        seconds = np.where(seen, busy_seconds(window), 1.0)
        steps = np.where(window.steps >= 1, window.steps, 1.0)[..., None]
        own = np.square(np.where(window.compute_std >= 0, window.compute_std, np.nan) / seconds)
        worked = np.where(window.batch_size > 0, window.worked, 1.0)
        samples = samples_by_candidate(even_share(window), worked)
        logs = np.log(samples)
        return cls(seen, seconds, own, steps, np.log(worked), samples, logs, np.log(seconds)[..., None] - logs)


class _Settled(NamedTuple):
    """Levels and suspected jumps, (..., W, G), after a window has shown which of the last jumps lasted."""

    level: Floats
    before: Floats
    lasted: Floats
    fresh: bool  # both arrays are new, so they may be written to


@dataclass(frozen=True, eq=False)
class WorkerCosts:
    """Each worker's alpha and beta while its speed jumps: a bank of Kalman filters, one for each candidate offset.

    A slowdown multiplies alpha and beta alike. So log seconds = log(a + b) + level: the offset a = alpha/beta (samples)
    is fixed and only the level moves. One filter follows the level for each a of `OFFSETS` times the base batch, and
    for each power of b. Past prediction errors weigh the candidates. A deviation of more than `gate` standard
    deviations is a jump, taken at once. If the window's standard deviation then exceeds the usual jitter, the excess
    says how far the jump goes beyond the window's mean.

    A stall looks like a jump until the next window, which decides. Until then both levels are kept. The estimate lies
    between them, in proportion to how often jumps have lasted so far.

    Settings:
      drift    standard deviation a window of the level
      spacing  standard deviation of the level per log change of size: the candidates are coarse, costs not quite affine
      gate     standard deviations beyond which a deviation is a jump
      torn     a window holds a jump if the variance within it is more than this many times the usual
      forget   factor a window on past prediction errors
      pooled   weight of the other workers' evidence on their offsets
      learn_error  whether `error` and `apart` are learned, else they stay 0. One worker's own jumps raise both
      follow   the part of a surprise shared by all workers that is believed; the rest counts as a passing wave
    State:
      level    (..., W, G), NaN before a worker was measured; `variance` (..., W) of it
      loss     (..., W, G) half the sum of squared normalised prediction errors
      size     (..., W) log samples when last measured
      before   (..., W, G) level before a jump that the next window must confirm, else NaN; `after` the level after it
      lasted   (..., 2) jumps that were confirmed, and that were not
      jitter   (..., W) s, variance of one step's seconds over their mean
      error    (...) variance of a window's mean that `jitter` does not explain; `apart` the same without the part that
               all workers share; `count` windows that both were learned from
      alpha    (..., W) s, and `beta` s/sample: the line that touches the costs at the sizes of the last window. A
               worker never measured has the others' mean; NaN if none was measured
    Derived or given:
      lean     prior against candidates, besides the evidence, like `loss`, (..., 1 or W, G)
      weights  (..., W, G) belief in each candidate at the last window, summing to 1
    """

    drift: float = 0.01
    spacing: float = 0.05
    gate: float = 3.0
    torn: float = 8.0
    forget: float = 0.98
    pooled: float = 1.0
    follow: float = 0.3
    learn_error: bool = True
    level: Floats = field(default_factory=nothing)
    loss: Floats = field(default_factory=nothing)
    variance: Floats = field(default_factory=nothing)
    size: Floats = field(default_factory=nothing)
    before: Floats = field(default_factory=nothing)
    after: Floats = field(default_factory=nothing)
    lasted: Floats = field(default_factory=nothing)
    jitter: Floats = field(default_factory=nothing)
    error: Floats = field(default_factory=nothing)
    apart: Floats = field(default_factory=nothing)
    count: Floats = field(default_factory=nothing)
    alpha: Floats = field(default_factory=nothing)
    beta: Floats = field(default_factory=nothing)
    lean: Floats = field(default_factory=lambda: NO_LEAN)
    weights: Floats = field(default_factory=nothing)

    FIELDS: ClassVar[tuple[str, ...]] = (
        *("level", "loss", "variance", "size", "before", "after", "lasted", "jitter", "error", "apart", "count"),
        *("alpha", "beta"),
    )

    def update(self, window: Window) -> WorkerCosts:
        """Take in a window. If its shape differs, start over."""
        seen = np.isfinite(busy_seconds(window))
        past = self if self.level.shape[:-1] == seen.shape else self._anew(seen.shape)
        return past._after(window, Reading.of(window, seen))

    def restored(self, state: dict[str, Any], lean: Floats = NO_LEAN) -> WorkerCosts:
        """These settings with the state that `saved` wrote."""
        past = dataclasses.replace(restored(self, state), lean=lean)
        if not past.level.size:
            return past
        big: dict[str, Any] = {name: laid_out(getattr(past, name)) for name in ("level", "loss", "before", "after")}
        return dataclasses.replace(past, **big, weights=past._weights(big["loss"]))

    def merged(self, newer: np.ndarray, new: WorkerCosts) -> WorkerCosts:
        """`new` in the clusters (...) that are `newer`, else this one."""
        weights = np.where(newer[..., None, None], new.weights, self.weights)
        return dataclasses.replace(merged(newer, new, self), weights=weights)

    def lean_to(self, offset: Floats, firmly: float) -> WorkerCosts:
        """From the next window on, favour offsets near `offset` (..., 1 or W), in base batches, by `firmly`."""
        near = np.log1p(offset)[..., None]
        beyond = np.broadcast_to(np.square(near), (*near.shape[:-1], len(POWERS)))  # a power has no offset
        lean = firmly * np.concatenate([np.square(np.log1p(OFFSETS) - near), beyond], -1)
        known = self.lean if self.lean.shape == lean.shape else np.zeros(lean.shape)
        return dataclasses.replace(self, lean=np.where(np.isnan(lean), known, lean))  # NaN: keep the old

    def seconds(self, batch: Floats, even: Floats) -> Floats:
        """Expected busy seconds (..., W) of `batch` (..., W) samples in the situation last measured; 0 for no samples.

        even   (...) samples of an even share of the base batch (`even_share`)

        One more leading dimension gives several allocations at once. Workers never measured get the others' mean; NaN
        if none was measured.
        """
        logs = self.level + np.log(samples_by_candidate(even, np.maximum(batch, 1.0)))
        seconds = np.exp((self.weights * logs).sum(-1))
        seconds = np.where(np.isnan(seconds), mean_of_known(seconds)[..., None], seconds)
        return np.where(batch > 0, seconds, 0.0)

    def _anew(self, shape: tuple[int, ...]) -> WorkerCosts:
        """Initial state for workers of this shape (..., W)."""
        prior = prior_loss()
        unknown = np.full((*shape, len(prior)), np.nan)
        none, unseen, clusters = np.zeros(shape), np.full(shape, np.nan), np.zeros(shape[:-1])
        return dataclasses.replace(
            self, level=unknown, before=unknown, after=unknown, loss=prior + np.zeros(unknown.shape), variance=none,
            jitter=unseen, size=unseen, lasted=np.zeros((*shape[:-1], 2)), error=clusters, apart=clusters,
            count=clusters, lean=NO_LEAN,
        )  # fmt: skip

    def _after(self, window: Window, now: Reading) -> WorkerCosts:
        """The state after a window of the same shape."""
        jitter = self._typical(now.own * now.seconds, now.seconds)
        usual = jitter / now.steps
        measured = usual + self.apart[..., None]
        settled = self._settled(now, measured)
        surprise = now.level - settled.level
        fresh = now.seen & np.isnan(settled.level[..., 0])
        changed = np.where(np.isnan(self.size), 0.0, now.size - self.size)
        prior = self.variance + self.drift**2 + (self.spacing * changed) ** 2
        torn = (now.own > self.torn * jitter) & (now.steps > 1)
        followed, foreseen = now.seen & ~fresh, prior + usual
        whole = followed & ~torn
        loss = self._weighed(surprise, whole, foreseen + self.error[..., None])
        weights = self._weights(loss)
        mean = (weights * _known(surprise)).sum(-1)
        common = _in_common(np.where(followed, mean, np.nan))
        total = prior + measured
        jump = followed & (torn | ((mean - common) ** 2 > self.gate**2 * total))
        beyond, gain = np.zeros(now.seconds.shape), np.where(fresh, 1.0, prior / total)
        uncertain = np.where(fresh, measured, prior * measured / total)
        before, after = settled.before, laid_out(self.after)
        if jump.any():
            lasted = np.broadcast_to(now.steps, jump.shape)
            beyond[jump] = _beyond(*(x[jump] for x in (now.seconds, mean, now.own, jitter, lasted)))
            gain = np.where(jump, np.minimum(_lasting(settled.lasted) / LASTING, 1.0), gain)
            uncertain = np.where(jump, measured + (0.3 * beyond) ** 2, uncertain)
            before = before if settled.fresh else before.copy(order="K")
            after = after.copy(order="K")
            stood = settled.level[jump]
            before[jump] = stood + np.broadcast_to(self.follow * common, jump.shape)[jump][:, None]
            after[jump] = stood + surprise[jump] + beyond[jump][:, None]
        level = _moved(settled.level, surprise, beyond, self.follow * common, gain, jump=jump, seen=now.seen)
        if fresh.any():
            level = np.where(fresh[..., None], now.level, level)
        own = np.where(
            jump | ~now.seen | np.isnan(now.own), self.jitter, np.minimum(now.own, self.torn * jitter) * now.seconds
        )
        found = np.where(whole, np.abs(np.stack([mean, mean - common])), np.nan)
        count = self.count + whole.any(-1)
        error, apart = self._learned(found, median_of_known(foreseen), count)
        alpha, beta = _line(window, now, level, weights)
        return dataclasses.replace(
            self, level=level, loss=loss, weights=weights, before=before, after=after, lasted=settled.lasted,
            variance=np.where(now.seen, uncertain, prior), size=np.where(now.seen, now.size, self.size), count=count,
            jitter=np.where(np.isnan(self.jitter), own, self.jitter + 0.15 * (own - self.jitter)),
            error=error, apart=apart, alpha=alpha, beta=beta,
        )  # fmt: skip

    # Arrays of W x G dominate the cost of a decision for many workers. So the code below changes fresh arrays in place,
    # and of old arrays copies only the rows that change.

    def _settled(self, now: Reading, measured: Floats) -> _Settled:
        """Decide by this window, of variance `measured` (..., W), whether the last suspected jumps lasted."""
        level, before = laid_out(self.level), laid_out(self.before)
        asked = now.seen & np.isfinite(before[..., 0])
        if not asked.any():
            return _Settled(level, before, 0.95 * self.lasted, False)
        weights, seen_level = self.weights[asked], now.level[asked]
        stayed, went = (
            np.square((weights * np.where(np.isnan(kept), 0.0, seen_level - kept)).sum(-1))
            for kept in (self.after[asked], before[asked])
        )
        chance = _lasting(self.lasted)
        odds = np.broadcast_to(np.log(chance) - np.log1p(-chance), asked.shape)[asked]
        lasts = np.zeros(asked.shape, dtype=bool)
        lasts[asked] = stayed - went < 2.0 * (measured + self.variance)[asked] * odds
        level, before = level.copy(order="K"), before.copy(order="K")
        level[asked] = np.where(lasts[asked][:, None], self.after[asked], before[asked])
        before[asked] = np.nan
        told = np.stack([lasts.sum(-1), (asked & ~lasts).sum(-1)], -1)
        return _Settled(level, before, 0.95 * self.lasted + told, True)

    def _weighed(self, surprise: Floats, whole: np.ndarray, expected: Floats) -> Floats:
        """Add the surprises, of variance `expected` (..., W), of the workers `whole` to the evidence (..., W, G)."""
        # Evidence is bounded: no candidate predicts a jump, so a jump must not decide between candidates.
        loss = laid_out(self.loss)
        told = np.square(surprise)
        told /= (2.0 * expected)[..., None]
        np.minimum(told, 0.5 * self.gate**2, out=told)
        told += self.forget * loss
        if not whole.all():
            told[~whole] = loss[~whole]
        return told

    def _weights(self, loss: Floats) -> Floats:
        """Belief in each candidate offset, (..., W, G), summing to 1."""
        likely = self.pooled * loss.mean(-2, keepdims=True) + loss + self.lean
        np.subtract(likely.min(-1, keepdims=True), likely, out=likely)
        np.exp(likely, out=likely)
        likely /= likely.sum(-1, keepdims=True)
        return np.asarray(likely)

    def _typical(self, own: Floats, seconds: Floats) -> Floats:
        """Relative variance of a step, (..., W): own history and the cluster's, else this window's, else (5 %)^2.

        Variances are assumed to grow with the mean: part of the jitter comes from the step, part from the machine.
        """
        known = np.where(np.isnan(self.jitter), own, self.jitter)
        cluster = median_of_known(known)[..., None]
        cluster = np.where(np.isnan(cluster), 0.05**2 * seconds, cluster)
        return np.maximum((0.5 * np.where(np.isnan(known), cluster, known) + 0.5 * cluster) / seconds, 1e-6)

    def _learned(self, surprise: Floats, explained: Floats, count: Floats) -> tuple[Floats, Floats]:
        """`error` and `apart` after this window. One worker's jump does not move them, jumps of all at once not far.

        Both follow the median surprise (2, ..., W) beyond `explained` (...), the median that jitter explains.
        """
        if not self.learn_error:
            return np.zeros(self.error.shape), np.zeros(self.apart.shape)
        error = np.stack([self.error, self.apart])
        usual = 1.4826 * median_of_known(surprise)
        told = np.isfinite(usual)
        explained = np.where(told, explained, 0.0)
        most = 4.0 * np.maximum(explained + error, 0.03**2)
        beyond = np.minimum(np.maximum(np.where(told, usual, 0.0) ** 2 - explained, 0.0), most)
        gain = np.where(told, np.maximum(1.0 / np.maximum(count, 1.0), 0.1), 0.0)
        learned = error + gain * (beyond - error)
        return learned[0, ...], learned[1, ...]


def prior_loss() -> Floats:
    """The prior loss of each candidate (G,)."""
    return np.concatenate([np.log(1.0 + OFFSETS / PRIOR), np.full(len(POWERS), 2.0)])


def even_share(window: Window) -> Floats:
    """Samples (...) of an even share of the base batch."""
    return np.asarray(base_total(window) / window.workers)


def samples_by_candidate(even: Floats, batch: Floats | Ints) -> Floats:
    """The quantity that each candidate's seconds are proportional to, (..., W, G): b + offset, or a power of b."""
    unit = even[..., None, None]
    size = np.asarray(batch, np.float64)[..., None, :]
    by_candidate = np.empty((*size.shape[:-2], PLAIN + len(POWERS), size.shape[-1]))
    np.add(OFFSETS[:, None] * unit, size, out=by_candidate[..., :PLAIN, :])
    np.multiply(unit, (size / unit) ** POWERS[:, None], out=by_candidate[..., PLAIN:, :])
    return laid_out(by_candidate.swapaxes(-1, -2))


def _line(window: Window, now: Reading, level: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """alpha (s) and beta (s/sample), (..., W), of the line that touches the costs at the sizes in force.

    An idle worker's line touches them at an even share.
    """
    idle = window.batch_size <= 0
    batch, samples, logs = window.batch_size, now.samples, now.logs
    if idle.any() or np.isfinite(window.work).any():
        batch = np.where(idle, even_share(window)[..., None], batch)
        samples = samples_by_candidate(even_share(window), batch)
        logs = np.log(samples)
    seconds = np.exp((weights * (level + logs)).sum(-1))
    # If time grows faster than the batch, the fixed cost is 0: a negative one would promise free samples.
    elasticity = (weights[..., :PLAIN] * (batch[..., None] / samples[..., :PLAIN])).sum(-1)
    growing = np.minimum(elasticity + (weights[..., PLAIN:] * POWERS).sum(-1), 1.0)
    alpha, beta = seconds * (1 - growing), seconds * growing / batch
    if np.isfinite(beta).all():
        return alpha, beta
    known_alpha, known_beta = mean_of_known(alpha)[..., None], mean_of_known(beta)[..., None]
    return np.where(np.isnan(alpha), known_alpha, alpha), np.where(np.isnan(beta), known_beta, beta)


def _moved(
    level: Floats, surprise: Floats, beyond: Floats, shift: Floats, gain: Floats, *, jump: np.ndarray, seen: np.ndarray
) -> Floats:
    """Levels after moving by `gain` (..., W) of the surprises, overwritten here; all workers share `shift` (..., 1)."""
    moved, shift = surprise, shift[..., None]
    if jump.any():
        moved[jump] += beyond[jump][:, None]
    moved -= shift
    moved *= gain[..., None]
    moved += shift
    moved = _known(moved)
    if not seen.all():
        moved[~seen] = 0.0
    moved += level
    return moved


def _lasting(lasted: Floats) -> Floats:
    """The chance, (..., 1), that what looks like a jump lasts; `lasted` (..., 2) counts those that did, and did not."""
    yes, no = lasted[..., :1], lasted[..., 1:]
    return np.asarray((yes + 10.0 * LASTING) / (yes + no + 10.0))


def _known(x: Floats) -> Floats:
    """(..., W, G) with 0 for workers without any measurement, whose whole row is NaN.

    A NaN spread makes such a row too; the level then stays as it is.
    """
    unknown = np.isnan(x[..., 0])
    return np.where(unknown[..., None], 0.0, x) if unknown.any() else x


def _in_common(surprise: Floats) -> Floats:
    """(..., 1) the part of the surprise that all workers share: it says nothing about any worker's share.

    The median of the surprises and one 0. So two workers that disagree have nothing in common, and neither has a
    single worker.
    """
    if surprise.shape[-1] < 2:
        return np.zeros(surprise.shape)
    return median_of_known(np.concatenate([surprise, np.zeros((*surprise.shape[:-1], 1))], -1))[..., None]


def _beyond(seconds: Floats, surprise: Floats, own: Floats, jitter: Floats, steps: Floats) -> Floats:
    """How far log seconds at the end of a window exceed its mean, if one jump within it caused the surprise.

    If a share f of k steps lies before a jump by d, the mean is (1 - f) d above the expected one and the variance is
    f (1 - f) d^2. Their quotient is f d, the part of the jump that the mean misses.
    """
    before = seconds * np.exp(-surprise)
    risen = seconds - before
    more = np.maximum(own - jitter, 0.0)
    variance = np.where(np.isnan(more), 0.0, more) * seconds**2 * (steps - 1) / steps
    missed = variance / np.where(risen == 0, 1.0, risen)
    most = (steps - 1) * np.abs(risen)
    missed = np.minimum(np.maximum(missed, -most), most)
    return np.asarray(np.log(np.maximum(seconds + missed, 0.25 * seconds) / seconds))
