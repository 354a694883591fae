"""Each worker's fixed and growing cost, learned online while its speed jumps about."""

from __future__ import annotations

import numpy as np

from dynamix.model.fitting import UNKNOWN, base_total, busy_seconds, laid_out, mean_of_known
from dynamix.window import Floats, Window

# Candidate fixed costs of a worker as multiples of the time that the samples of its base batch take. Beforehand they are
# believed as 1 / (1 + offset / PRIOR): small ones are commoner, also among the calibrated GPUs.
OFFSETS: Floats = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 5.0, 8.0, 16.0])
PRIOR = 2.0
# Beyond a memory cliff time grows faster than the batch.
POWERS: Floats = np.array([1.5, 2.0])

# Beforehand what looks like a jump is one nine times in ten, and taken in full; less as soon as jumps have not lasted.
LASTING = 0.9


class WorkerCosts:
    """Each worker's alpha and beta while its speed jumps about: a bank of Kalman filters, one per candidate offset.

    A slowdown multiplies alpha and beta alike, so log seconds = log(a + b) + level, where the offset a = alpha/beta
    (samples) is fixed and only the level moves. For every a of `OFFSETS` times the base batch, and for growth with a power
    of b, a filter follows the level; how well its predictions came true weighs the candidates. A deviation of more than `gate` standard deviations is a
    jump, taken at once; what a window's standard deviation exceeds the usual jitter by then says how far the jump goes
    on beyond the window's mean.

    A stall looks like a jump until the next window: both levels are kept for that long, the one in between is believed
    as far as jumps have lasted so far, and the next window decides.

    drift   standard deviation a window of the level
    spacing standard deviation of the level per log change of size: the candidates are coarse, costs not quite affine
    follow  how much of a surprise that all workers share is believed; the rest of it is taken for a wave that passes
    forget  factor a window on past prediction errors
    pooled  how much of the other workers' evidence on their offsets counts for each
    """

    def __init__(
        self, *, drift: float = 0.01, spacing: float = 0.05, gate: float = 3.0, torn: float = 8.0,
        forget: float = 0.98, pooled: float = 1.0, follow: float = 0.3,
    ) -> None:  # fmt: skip
        self.follow = follow
        self.drift, self.spacing, self.gate, self.torn = drift, spacing, gate, torn
        self.forget, self.pooled = forget, pooled
        self.level: Floats = UNKNOWN  # (..., W, G), NaN before a worker was seen
        self.loss: Floats = UNKNOWN  # (..., W, G), half the sum of squared normalised prediction errors
        self.variance: Floats = UNKNOWN  # (..., W) of the level
        self.size: Floats = UNKNOWN  # (..., W) log samples when last seen
        self.before: Floats = UNKNOWN  # (..., W, G) level before a jump that the next window must confirm, else NaN
        self.after: Floats = UNKNOWN  # (..., W, G) and the level that the jump means
        self.lasted: Floats = UNKNOWN  # (..., 2) jumps that were confirmed, and that were not
        self.jitter: Floats = UNKNOWN  # (..., W) s, variance of one step's seconds over their mean
        self.error: Floats = UNKNOWN  # (...) variance of a window's mean that `jitter` does not explain
        self.apart: Floats = UNKNOWN  # (...) the same without what all workers have in common
        self.count: Floats = UNKNOWN  # (...) windows that both were learned from
        # What speaks against candidates beside the evidence, as `loss`, (..., 1 or W, G).
        self.lean: Floats = np.zeros(1)
        # Kept because it is asked again: the weights that follow from `loss`, and the last window with its `_samples` and their log.
        self._weighed: tuple[Floats, Floats] = (np.empty(0), UNKNOWN)
        self._latest: tuple[Window | None, Floats, Floats] = (None, UNKNOWN, UNKNOWN)

    def update(self, window: Window) -> None:
        """Take in a window."""
        busy = busy_seconds(window)
        seen = np.isfinite(busy)
        if self.level.shape[:-1] != busy.shape:
            self._start(busy.shape)
        for name in ("level", "loss", "before", "after"):
            setattr(self, name, laid_out(getattr(self, name)))
        seconds = np.where(seen, busy, 1.0)
        steps = np.where(window.steps >= 1, window.steps, 1.0)[..., None]
        own = np.square(np.where(window.compute_std >= 0, window.compute_std, np.nan) / seconds)
        jitter = self._typical(own * seconds, seconds)
        samples = self._samples(window, np.maximum(window.batch_size, 1))
        offset = np.log(samples)
        self._latest = window, samples, offset
        seen_level = np.log(seconds)[..., None] - offset
        usual = jitter / steps
        measured = usual + self.apart[..., None]
        self._settle(seen_level, seen, measured)
        surprise = seen_level - self.level
        fresh = seen & np.isnan(self.level[..., 0])
        size = np.log(np.maximum(window.batch_size, 1))
        changed = np.where(np.isnan(self.size), 0.0, size - self.size)
        self.size = np.where(seen, size, self.size)
        prior = self.variance + self.drift**2 + (self.spacing * changed) ** 2
        torn = (own > self.torn * jitter) & (steps > 1)
        followed, foreseen = seen & ~fresh, prior + usual
        whole = followed & ~torn
        self._weigh(surprise, whole, foreseen + self.error[..., None])
        mean = (self.weights() * _known(surprise)).sum(-1)
        common = _in_common(np.where(followed, mean, np.nan))
        total = prior + measured
        jump = followed & (torn | ((mean - common) ** 2 > self.gate**2 * total))
        beyond, gain = np.zeros(busy.shape), np.where(fresh, 1.0, prior / total)
        uncertain = np.where(fresh, measured, prior * measured / total)
        if jump.any():
            lasted = np.broadcast_to(steps, busy.shape)
            beyond[jump] = _beyond(*(x[jump] for x in (seconds, mean, own, jitter, lasted)))
            gain = np.where(jump, np.minimum(self._lasting() / LASTING, 1.0), gain)
            uncertain = np.where(jump, measured + (0.3 * beyond) ** 2, uncertain)
        self._move(surprise, beyond, self.follow * common, gain, jump=jump, seen=seen)
        if fresh.any():
            self.level = np.where(fresh[..., None], seen_level, self.level)
        self.variance = np.where(seen, uncertain, prior)
        own = np.where(jump | ~seen | np.isnan(own), self.jitter, np.minimum(own, self.torn * jitter) * seconds)
        self.jitter = np.where(np.isnan(self.jitter), own, self.jitter + 0.15 * (own - self.jitter))
        self.count = self.count + (whole.any(-1))
        found = np.where(whole, np.abs(np.stack([mean, mean - common])), np.nan)
        learned = self._learned(np.stack([self.error, self.apart]), found, _median_of_known(foreseen))
        self.error, self.apart = learned[0, ...], learned[1, ...]

    # Arrays of W x G are what a decision for many workers costs: below they are changed in place, and only the rows that
    # need it are touched.

    def _weigh(self, surprise: Floats, whole: np.ndarray, expected: Floats) -> None:
        """Add a window's surprises (..., W, G), of variance `expected` (..., W), to the evidence of workers `whole`."""
        # Evidence is bounded, so a jump, which no candidate foresees, tells nothing; a wrong offset is no jump.
        told = np.square(surprise)
        told /= (2.0 * expected)[..., None]
        np.minimum(told, 0.5 * self.gate**2, out=told)
        told += self.forget * self.loss
        if not whole.all():
            told[~whole] = self.loss[~whole]
        self.loss = told

    def _move(
        self, surprise: Floats, beyond: Floats, shift: Floats, gain: Floats, *, jump: np.ndarray, seen: np.ndarray
    ) -> None:
        """Move levels by `gain` (..., W) of the surprises, which it uses up; `shift` (..., 1) of them all workers share."""
        moved, shift = surprise, shift[..., None]
        if jump.any():
            level, leap = self.level[jump], beyond[jump][:, None]
            self.before[jump] = level + np.broadcast_to(shift[..., 0], jump.shape)[jump][:, None]
            self.after[jump] = level + moved[jump] + leap
            moved[jump] += leap
        moved -= shift
        moved *= gain[..., None]
        moved += shift
        moved = _known(moved)
        if not seen.all():
            moved[~seen] = 0.0
        moved += self.level
        self.level = moved

    def _settle(self, seen_level: Floats, seen: np.ndarray, measured: Floats) -> None:
        """Decide by this window (level (..., W, G) if it is true of every candidate) whether the last jumps were jumps."""
        asked = seen & np.isfinite(self.before[..., 0])
        if not asked.any():
            self.lasted = 0.95 * self.lasted
            return
        lasts = np.zeros(asked.shape, dtype=bool)
        weights, now = self.weights()[asked], seen_level[asked]
        stayed, went = (
            np.square((weights * np.where(np.isnan(level), 0.0, now - level)).sum(-1))
            for level in (self.after[asked], self.before[asked])
        )
        odds = np.broadcast_to(np.log(self._lasting()) - np.log1p(-self._lasting()), asked.shape)[asked]
        lasts[asked] = stayed - went < 2.0 * (measured + self.variance)[asked] * odds
        self.level[asked] = np.where(lasts[asked][:, None], self.after[asked], self.before[asked])
        self.before[asked] = np.nan
        told = np.stack([lasts.sum(-1), (asked & ~lasts).sum(-1)], -1)
        self.lasted = 0.95 * self.lasted + told

    def _lasting(self) -> Floats:
        """The chance, (..., 1), that what looks like a jump is one."""
        yes, no = self.lasted[..., :1], self.lasted[..., 1:]
        return np.asarray((yes + 10.0 * LASTING) / (yes + no + 10.0))

    def weights(self) -> Floats:
        """How much each candidate offset is believed, (..., W, G), summing to 1."""
        if self._weighed[0] is not self.loss:  # asked three times a window
            likely = self.pooled * self.loss.mean(-2, keepdims=True) + self.loss + self.lean
            np.subtract(likely.min(-1, keepdims=True), likely, out=likely)
            np.exp(likely, out=likely)
            likely /= likely.sum(-1, keepdims=True)
            self._weighed = self.loss, likely
        return self._weighed[1]

    def lean_to(self, offset: Floats, firmly: float) -> None:
        """From the next window on, believe offsets near `offset` (..., 1 or W), in base batches, the more `firmly` the more."""
        near = np.log1p(offset)[..., None]
        beyond = np.broadcast_to(np.square(near), (*near.shape[:-1], len(POWERS)))  # a power has no offset
        lean = firmly * np.concatenate([np.square(np.log1p(OFFSETS) - near), beyond], -1)
        known = self.lean if self.lean.shape == lean.shape else np.zeros(lean.shape)
        self.lean = np.where(np.isnan(lean), known, lean)  # of an unknown offset nothing new

    def at(self, window: Window) -> tuple[Floats, Floats]:
        """alpha (s) and beta (s/sample), (..., W), of the line that touches the costs at the sizes in force.

        Workers never measured get the others' mean; NaN where nobody was.
        """
        idle = window.batch_size <= 0
        batch = np.where(idle, base_total(window)[..., None] / window.workers, window.batch_size)
        latest, samples, logs = self._latest
        if latest is not window or idle.any():
            samples = self._samples(window, batch)
            logs = np.log(samples)
        weights = self.weights()
        seconds = np.exp((weights * (self.level + logs)).sum(-1))
        # Where time grows faster than the batch the line ends at no fixed cost: a negative one would promise free samples.
        plain = len(OFFSETS)
        elasticity = (weights[..., :plain] * (batch[..., None] / samples[..., :plain])).sum(-1)
        growing = np.minimum(elasticity + (weights[..., plain:] * POWERS).sum(-1), 1.0)
        alpha, beta = seconds * (1 - growing), seconds * growing / batch
        if np.isfinite(beta).all():
            return alpha, beta
        known_alpha, known_beta = mean_of_known(alpha)[..., None], mean_of_known(beta)[..., None]
        return np.where(np.isnan(alpha), known_alpha, alpha), np.where(np.isnan(beta), known_beta, beta)

    def seconds(self, window: Window, batch: Floats) -> Floats:
        """Expected busy seconds (..., W) of `batch` (..., W) samples in the situation last seen; 0 where there are none.

        Workers never measured get the others' mean; NaN where nobody was.
        """
        logs = self.level + np.log(self._samples(window, np.maximum(batch, 1.0)))
        seconds = np.exp((self.weights() * logs).sum(-1))
        seconds = np.where(np.isnan(seconds), mean_of_known(seconds)[..., None], seconds)
        return np.where(batch > 0, seconds, 0.0)

    def _samples(self, window: Window, batch: Floats | np.ndarray) -> Floats:
        """What seconds are proportional to by each candidate, (..., W, G): b + offset, or a power of b."""
        unit = base_total(window)[..., None, None] / window.workers
        size = np.asarray(batch, np.float64)[..., None, :]
        plain, workers = len(OFFSETS), size.shape[-1]
        by_candidate = np.empty((*size.shape[:-2], plain + len(POWERS), workers))
        np.add(OFFSETS[:, None] * unit, size, out=by_candidate[..., :plain, :])
        np.multiply(unit, (size / unit) ** POWERS[:, None], out=by_candidate[..., plain:, :])
        return laid_out(by_candidate.swapaxes(-1, -2))

    def _typical(self, own: Floats, seconds: Floats) -> Floats:
        """Relative variance of a step, (..., W): own history and the cluster's, else this window's, else (5 %)^2.

        Variances are taken to grow with the mean: some part of a jitter is of the step, some is of the machine.
        """
        known = np.where(np.isnan(self.jitter), own, self.jitter)
        cluster = _median_of_known(known)[..., None]
        cluster = np.where(np.isnan(cluster), 0.05**2 * seconds, cluster)
        return np.maximum((0.5 * np.where(np.isnan(known), cluster, known) + 0.5 * cluster) / seconds, 1e-6)

    def _learned(self, error: Floats, surprise: Floats, explained: Floats) -> Floats:
        """`error` (2, ...) after this window: what the median surprise (2, ..., W) says beyond `explained`, the median of what
        jitter explains (...); one jump does not move it, all together not far."""
        usual = 1.4826 * _median_of_known(surprise)
        told = np.isfinite(usual)
        explained = np.where(told, explained, 0.0)
        most = 4.0 * np.maximum(explained + error, 0.03**2)
        beyond = np.minimum(np.maximum(np.where(told, usual, 0.0) ** 2 - explained, 0.0), most)
        gain = np.where(told, np.maximum(1.0 / np.maximum(self.count, 1.0), 0.1), 0.0)
        return np.asarray(error + gain * (beyond - error))

    def _start(self, shape: tuple[int, ...]) -> None:
        prior = np.concatenate([np.log(1.0 + OFFSETS / PRIOR), np.full(len(POWERS), 2.0)])
        self.level, self.lean = np.full((*shape, len(prior)), np.nan), np.zeros(1)
        self.loss = prior + np.zeros(self.level.shape)
        self.variance, self.jitter, self.size = np.zeros(shape), np.full(shape, np.nan), np.full(shape, np.nan)
        self.before, self.after = np.full((2, *self.level.shape), np.nan)
        self.lasted = np.zeros((*shape[:-1], 2))
        self.error, self.apart, self.count = np.zeros((3, *shape[:-1]))

    FIELDS = ("level", "loss", "variance", "size", "before", "after", "lasted", "jitter", "error", "apart", "count")


def _known(x: Floats) -> Floats:
    """(..., W, G) with 0 for workers of whom nothing is known: then their whole row is NaN."""
    unknown = np.isnan(x[..., 0])
    return np.where(unknown[..., None], 0.0, x) if unknown.any() else x


def _in_common(surprise: Floats) -> Floats:
    """(..., 1) what the workers' surprises have in common: it says nothing about anyone's share.

    Their median, with "no change" as one more voice: two workers that disagree have nothing in common, nor has one alone.
    """
    if surprise.shape[-1] < 2:
        return np.zeros(surprise.shape)
    return _median_of_known(np.concatenate([surprise, np.zeros((*surprise.shape[:-1], 1))], -1))[..., None]


def _beyond(seconds: Floats, surprise: Floats, own: Floats, jitter: Floats, steps: Floats) -> Floats:
    """How far log seconds at the end of a window lie beyond its mean, if one jump within it made the surprise.

    A share f of k steps before a jump by d gives a mean (1 - f) d above what was expected and a variance f (1 - f) d^2;
    their quotient is f d, the part of the jump that the mean misses.
    """
    before = seconds * np.exp(-surprise)
    risen = seconds - before
    more = np.maximum(own - jitter, 0.0)
    variance = np.where(np.isnan(more), 0.0, more) * seconds**2 * (steps - 1) / steps
    missed = variance / np.where(risen == 0, 1.0, risen)
    most = (steps - 1) * np.abs(risen)
    missed = np.minimum(np.maximum(missed, -most), most)
    return np.asarray(np.log(np.maximum(seconds + missed, 0.25 * seconds) / seconds))


def _median_of_known(x: Floats) -> Floats:
    """Lower median over the last axis of what is finite; NaN where nothing is."""
    last = np.maximum(np.isfinite(x).sum(-1, keepdims=True) - 1, 0)
    ordered = np.sort(x, axis=-1)
    if x.ndim == 1:  # `take_along_axis` costs as much as the sort
        return np.asarray(ordered[last[0] // 2])
    return np.asarray(np.take_along_axis(ordered, last // 2, -1)[..., 0])
