"""The most that agents can deliver who go in and come out together: a plan that an integer program finds, played.

The program's variables are moves of one period: who is in a cell at a time, empty or laden, and where it goes. Nobody
shares a cell, no two change places, and what flows into a cell at a time flows out of it. At the start all are at home.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from dynamix_lab.excavation.ground import GROUNDS, Burrow
from dynamix_lab.excavation.world import Excavation, ExcavationConfig

SHAPE = GROUNDS["single-file"]
Plan = dict[tuple[int, int], int]  # time and cell -> action


def plan(agents: int, period: int) -> Plan | None:
    """The moves of a period in which `agents` deliver a pellet each; None if there are none."""
    ground = Burrow(SHAPE)
    steps = [0, -ground.width, ground.width, -1, 1]
    free = np.flatnonzero(~ground.rock).tolist()

    def laden(cell: int, before: bool) -> bool:
        return bool(not ground.nest[cell] and (before or ground.face[cell]))

    moves = [
        (time, cell, state, action)
        for time in range(period)
        for cell in free
        for state in {laden(cell, False), laden(cell, True)}
        for action, step in enumerate(steps)
        if not ground.rock[cell + step] and (time or ground.nest[cell])
    ]
    sums: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)  # rows of the program: (variable, sign)
    for i, (time, cell, state, action) in enumerate(moves):
        end = cell + steps[action]
        sums["flow", time, cell, state].append((i, 1))
        sums["flow", (time + 1) % period, end, laden(end, state)].append((i, -1))
        sums["one", time, cell].append((i, 1))
        if end != cell:
            sums["no change of places", time, min(cell, end), max(cell, end)].append((i, 1))
        if time == 0:
            sums["agents",].append((i, 1))
        if state and ground.nest[end]:
            sums["delivered",].append((i, 1))
    entries = [(row, i, sign) for row, of_row in enumerate(sums.values()) for i, sign in of_row]
    rows, columns, signs = (np.array(column) for column in zip(*entries, strict=True))
    low = [agents if key[0] in ("agents", "delivered") else 0 for key in sums]
    high = [agents if key[0] in ("agents", "delivered") else int(key[0] != "flow") for key in sums]
    found = milp(
        [float(action != 0) for *_, action in moves],
        constraints=LinearConstraint(csr_matrix((signs, (rows, columns))), low, high),
        integrality=np.ones(len(moves)),
        bounds=Bounds(0, 1),
    )
    if found.x is None:
        return None
    chosen = [move for move, taken in zip(moves, found.x, strict=True) if taken > 0.5]
    return {(time, cell): action for time, cell, _, action in chosen}


@pytest.mark.parametrize(("agents", "pellets"), [(4, 188), (5, 215), (6, 240)])
def test_so_many_go_in_and_come_out_in_twice_their_number_and_13_steps_and_not_in_fewer(
    agents: int, pellets: int
) -> None:
    period = 2 * agents + 13
    assert plan(agents, period - 1) is None
    found = plan(agents, period)
    assert found is not None
    world, small = Excavation(ExcavationConfig(SHAPE), agents=agents), Burrow(SHAPE)
    of_world = dict(zip(np.flatnonzero(~world.burrow.rock).tolist(), np.flatnonzero(~small.rock).tolist(), strict=True))
    starts = [cell for cell, other in of_world.items() if (0, other) in found]
    world.load_state_dict({**world.state_dict(), "place": np.array([starts])})
    for time in range(1000):
        world.step([[found[time % period, of_world[int(cell)]] for cell in world.place[0]]])
    assert int(world.workload().delivered.sum()) == pellets
    assert not world.workload().collisions.any()
