"""Scenarios of hosts behind processor quotas on the virtual clock, for a job of any gradients."""

from __future__ import annotations

import numpy as np

from dynamix.window import Floats
from dynamix_lab.emulator import Scenario
from dynamix_lab.opponents.course import Course, ring_mbit
from dynamix_lab.opponents.world import round_s
from dynamix_lab.simulator.rounds import RoundApart
from dynamix_lab.suites.fidelity.live_costs import LiveCosts
from dynamix_lab.suites.fidelity.scenario_env import ScenarioEnv, simulated_hosts, slowdowns

# What a step costs beside its samples and bytes: of the order that fits to runs on emulated hosts found.
SMALL_SHARE, EXCHANGE_S, EXCHANGE_PER_SPEED = 0.1, 0.002, 0.004
JITTER_S, JITTER_SD, TOGETHER_SD = 0.005, 0.05, 0.05
# The demo's net on the shared cores of a loaded machine, core-s, from such a fit.
DEMO_ALPHA, DEMO_BETA = 0.004, 0.0002


def quota_costs(alpha: float = DEMO_ALPHA, beta: float = DEMO_BETA) -> LiveCosts:
    """Costs of a net that needs alpha + beta b core-s for b samples; the rest is the emulator's usual.

    Its model of the training says nothing: it is for worlds in which training is real.
    """
    return LiveCosts(
        alpha,
        beta,
        SMALL_SHARE,
        EXCHANGE_S,
        EXCHANGE_PER_SPEED,
        JITTER_S,
        JITTER_SD,
        TOGETHER_SD,
        knots=(0.0, 0.0),
        samples=1.0,
    )


class QuotaWorld(ScenarioEnv):
    """One simulated cluster on a scenario's quota hosts, whose clock starts at 0.

    A synchronous step is `ScenarioEnv`'s. Workers that train for themselves ask the same three questions as of a
    `DeviceWorld`; their answers are without jitter, which averages out over a round of several steps.

    scenario        its hosts' shares of a core, links and disturbances
    costs           of a step
    seed            of the disturbances
    gradient_bytes  of one exchange
    batch_size      samples per worker at the start
    longest_s       virtual seconds until which synchronous steps are disturbed; the last state holds on
    """

    def __init__(
        self,
        scenario: Scenario,
        costs: LiveCosts,
        *,
        seed: int,
        gradient_bytes: int,
        batch_size: int,
        longest_s: float,
    ) -> None:
        cores = np.array([host.cpu for host in scenario.hosts])
        hosts = simulated_hosts(costs, cores, np.array([scenario.workers * batch_size]))
        trace = slowdowns(scenario, seed, longest_s, exponent=1 + costs.small_share)
        super().__init__(scenario, seed, costs, hosts, interval=1, delay=1, trace=trace)
        self.course = Course(scenario, seed)
        self._moved = ring_mbit(scenario.workers, gradient_bytes)
        self.reset()
        self.steps, self.clock_s, self.progress = 0, np.zeros(1), np.zeros(1)
        self._met = set()

    def advance_apart(self, done: RoundApart) -> tuple[Floats, Floats]:
        """One round; compute (1, W) and the whole round (1,), s."""
        busy, whole_s = round_s(self, done, np.zeros(self._scenario.workers), float(self.clock_s[0]))
        self._passed(whole := np.array([whole_s]))
        return busy[None], whole

    def device_s(self, samples: int, cost: float = 0.0) -> float:
        """Work of one pass over `samples`: seconds on one whole core; 0 for no samples. Costs of samples are unknown
        to these hosts."""
        return float(self._live.seconds(np.array(float(samples)), np.array(1.0))) if samples else 0.0

    def finish_s(self, worker: int, work_s: float, start_s: float) -> float:
        """When `work_s` begun at `start_s` is done on the worker's share of a core of each moment."""
        exponent = 1 + self._live.small_share  # short slices lose their caches
        return self.course.done_s(work_s, start_s, lambda stretch: stretch.speeds[worker] ** exponent)

    def meeting_s(self, payload_bytes: int, at_s: float) -> float:
        """Seconds of a ring all-reduce of `payload_bytes` begun by all at `at_s`; 0 for one worker.

        It ends with the host of the smallest share, since each does its part of the work on its own.
        """
        workers = self._scenario.workers
        if workers == 1:
            return 0.0
        slowest = min(self.course.at(at_s).speeds)
        begun_s = at_s + self._live.exchange_s + self._live.exchange_per_speed / slowest
        moved = ring_mbit(workers, payload_bytes)
        return self.course.done_s(moved, begun_s, lambda stretch: stretch.slowest_mbit_s) - at_s
