"""Workers of the virtual clock: a live job's recorders, with times from a simulated cluster."""

from collections.abc import Sequence

import numpy as np
import torch

from dynamix.data import Round
from dynamix.errors import ConfigError
from dynamix.probes.timing import CpuClock
from dynamix.runtime.measure.recorder import Recorder
from dynamix.runtime.measure.row import ROW
from dynamix.window import Floats, Ints
from dynamix_lab.simulator.clusters import Clusters
from dynamix_lab.simulator.env import ClusterEnv
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.virtual.union_gradient import ShareSeen

Shares = Sequence[Sequence[ShareSeen]]  # by worker: its observations of its pieces; empty for a share of zero
_NO_DEVICE = torch.device("meta")  # a recorder on it inspects no host
_COMPUTE = [ROW.index("compute"), ROW.index("compute_std")]


class VirtualTime(CpuClock):
    """The clock of simulated workers: it returns the time that was set, in seconds."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s


class VirtualWorkers:
    """W recorders whose marks are set by the simulated step: forward at its start, gradients ready after the worker's
    own computing, reduction at its end. A live job's code then derives waits and transfer."""

    def __init__(self, world: ClusterEnv) -> None:
        self.world, self.time = world, VirtualTime()
        self.count = world.clusters.shape[1]
        self.recorders = [Recorder(_NO_DEVICE, clock=self.time) for _ in range(self.count)]
        self._applied: Ints | None = None
        self._clear()

    def _clear(self) -> None:
        self._busy_s, self._whole_s = np.zeros(self.count), 0.0

    def spend(
        self, coming: Round, costs: Floats | None = None, apart: RoundApart | None = None
    ) -> tuple[Floats, float]:
        """Advance the world by one step on `coming.counts` (1, W). Returns each worker's computing (W,), and the total.

        costs   (W,) extra cost of each worker's samples; None: 0
        apart   how the workers divide these counts into local steps; None: they average gradients
        """
        counts = np.array(coming.counts, dtype=np.int64)
        changed = self._applied is not None and not np.array_equal(counts, self._applied)
        if coming.regular and changed:
            self.world.apply(counts)
        else:
            self.world.batch = counts  # the end of an epoch is no new allocation
        self._applied = counts if coming.regular else self._applied
        if costs is not None:
            self.world.charge(costs[None])
        busy, whole = self.world.advance() if apart is None else self.world.advance_apart(apart)
        return busy[0], float(whole[0])

    def most(self, micro_batch: int) -> list[int]:
        """Samples of each worker's pieces: `micro_batch`, or what the simulated memory holds."""
        cap = self.world.clusters.memory_cap
        held = np.full(self.count, micro_batch) if cap is None else np.minimum(cap[0], micro_batch)
        return [int(most) for most in held]

    def norms_due(self) -> bool:
        """Whether the next step's squared norms must be measured, as in a live job."""
        return self.recorders[0].norms_due()

    def record(
        self,
        done: Round,
        busy_s: Floats,
        whole_s: float,
        seen: Shares,
        global_sq: float | None,
        *,
        keep: bool,
        first_of_epoch: bool,
    ) -> None:
        """Record the optimizer step `done` in every worker's recorder. The clock is then at its end.

        global_sq   |g|^2, None if norms were not due
        """
        begin = self.time.now_s
        if keep:
            self._busy_s, self._whole_s = self._busy_s + busy_s, self._whole_s + whole_s
        for rank, (recorder, own_s, pieces) in enumerate(zip(self.recorders, busy_s.tolist(), seen, strict=True)):
            self.time.now_s = begin
            recorder.timer.forward_started()
            self.time.now_s = begin + own_s
            recorder.timer.gradients_ready()
            self.time.now_s = begin + whole_s
            recorder.timer.reduced()
            for piece in pieces:
                recorder.add("loss", piece.loss, weight=piece.samples)
                if global_sq is not None:
                    recorder.add("local_sq", piece.norm_sq)
                if piece.target is not None and not piece.target.is_floating_point():  # a regression has no accuracy
                    recorder.observe(None, piece.logits, piece.target, samples=piece.samples)
            if global_sq is not None:
                recorder.add("global_sq", global_sq)
            recorder.step_done(keep=keep, first_of_epoch=first_of_epoch, dealt=done.dealt_to(rank))

    def rows(self, sizes: Ints, *, issued: int) -> Floats:
        """Close the window. Returns the rows (W, n) for `assemble`."""
        total = float(sizes.sum())
        parts = zip(self.recorders, map(float, sizes.tolist()), strict=True)
        rows = np.stack([recorder.row(issued=issued, count=n, weight=n / total) for recorder, n in parts])
        whole_s, steps = np.array([self._whole_s]), self.recorders[0].steps
        for name, values in self.world.host_figures(self._busy_s[None], whole_s, steps).items():
            rows[:, ROW.index(name)] = values[0]
        self._clear()
        rows[np.ix_(sizes == 0, _COMPUTE)] = np.nan  # an idle worker's speed is unknown, not infinite
        return rows

    def reset(self) -> None:
        """Discard the open window."""
        self._clear()
        for recorder in self.recorders:
            recorder.reset()


def one_world(clusters: Clusters | ClusterEnv, seed: int) -> ClusterEnv:
    """The environment whose clock is used. Raises `ConfigError` unless it has one cluster."""
    shape = clusters.shape if isinstance(clusters, Clusters) else clusters.clusters.shape
    if shape[0] != 1:
        raise ConfigError("clusters", f"{shape[0]} clusters", "1 cluster", "choose one with clusters.take([i])")
    return ClusterEnv(clusters, seed=seed, interval=1) if isinstance(clusters, Clusters) else clusters
