"""Record what every policy decides, and ask it again: `python -m dynamix_lab.suites.decisions.replay record FILE.npz`.

The module runs under any revision of dynamix, so it imports nothing of it but through `revision.found`; the suite
starts it in a process of its own with the revision's source first on the path. A decision that differs in a replay
changes no later window, since those follow from the recorded answers. FILE holds the plan as JSON, the recorded sizes
and whose answer each guard gave.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamix_lab.suites.decisions.asked import make, reloaded, whose
from dynamix_lab.suites.decisions.corpus import Array, Trajectory, plan
from dynamix_lab.suites.decisions.revision import in_rounds
from dynamix_lab.suites.decisions.story import Story

FORMAT = 1  # of the file
ALLOWED = 1e-3  # part of the windows that may differ, each by one quantum: processors round exp differently


def play(spec: Trajectory, recorded: list[Array] | None = None) -> Iterator[tuple[Array, Array]]:
    """Each decision of a trajectory: sizes, -1 where the policy raised, and whose answer it was.

    The windows follow from `recorded`, or from these decisions themselves if it is None.
    """
    clock = [0]
    policy = make(spec.policy, clock)
    for part, (windows, lead, workers) in enumerate(spec.parts):
        story = Story(spec, part)
        for t in range(windows):
            window, bounds = story.window(t), story.bounds(t)
            if spec.reload and clock[0] % spec.reload == spec.reload - 1:
                policy = reloaded(policy, spec.policy, clock)
            try:
                asked, within, pieces = in_rounds(window, bounds, spec.micro_batches)
                sizes = np.asarray(policy.decide(asked, within)) // pieces
            except Exception as error:
                print(f"{spec.policy}: window {clock[0]}: {error!r}", file=sys.stderr)
                sizes = np.full((*lead, workers), -1)
            yield sizes, whose(policy, lead)
            known = sizes if recorded is None else recorded[clock[0]]
            story.answered(t, window, story.sizes if (known < 0).any() else np.asarray(known, dtype=np.int64))
            clock[0] += 1


def _one_thread() -> None:
    """Sums in torch must not depend on the number of cores; warnings of guards are expected."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def record(file: Path, specs: Sequence[Trajectory] | None = None) -> dict[str, Any]:
    """Write the corpus, or only the trajectories `specs` of it; returns what it covers."""
    _one_thread()
    specs, began = specs or plan(), time.process_time()
    sizes: list[Array] = []
    owners: list[Array] = []
    covered: dict[str, dict[str, Any]] = {}
    for spec in specs:
        answers = list(play(spec))
        sizes += [answer.reshape(-1) for answer, _ in answers]
        owners += [who.reshape(-1) for _, who in answers]
        seen = covered.setdefault(spec.policy, {"windows": 0, "raised": 0, "whose": [0] * 11})
        seen["windows"] += len(answers)
        seen["raised"] += sum(int((answer < 0).any()) for answer, _ in answers)
        for _, who in answers:
            seen["whose"] = [n + int((who == code).sum()) for code, n in enumerate(seen["whose"])]
    every = np.concatenate(sizes)
    text = json.dumps({"schema": FORMAT, "trajectories": [dataclasses.asdict(spec) for spec in specs]})
    small = np.int16 if every.max() < 2**15 else np.int32
    np.savez_compressed(file, plan=np.asarray(text), sizes=every.astype(small), whose=np.concatenate(owners))
    counted = {"windows": len(sizes), "sizes": len(every), "trajectories": len(specs), "bytes": file.stat().st_size}
    return {**counted, "cpu_s": round(time.process_time() - began, 1), "policies": covered}


def replay(file: Path) -> dict[str, Any]:
    """Ask everything again; how the answers differ from the recorded ones, for each policy and together."""
    _one_thread()
    began = time.process_time()
    with np.load(file, allow_pickle=False) as stored:
        text, every, owned = str(stored["plan"]), stored["sizes"], stored["whose"]
    policies: dict[str, dict[str, Any]] = {}
    first: list[dict[str, Any]] = []
    at = who_at = 0
    for number, plain in enumerate(json.loads(text)["trajectories"]):
        spec = Trajectory.from_dict(plain)
        recorded: list[Array] = []
        owners: list[Array] = []
        for shape in spec.shapes():
            size, clusters = int(np.prod(shape)), int(np.prod(shape[:-1]))
            recorded.append(every[at : at + size].reshape(shape).astype(np.int64))
            owners.append(owned[who_at : who_at + clusters].reshape(shape[:-1]))
            at, who_at = at + size, who_at + clusters
        found = policies.setdefault(spec.policy, _nothing())
        for t, (sizes, who) in enumerate(play(spec, recorded)):
            beyond = _compare(found, recorded[t], sizes, spec.quantum, bool((who != owners[t]).any()))
            if beyond and len(first) < 20:
                first.append({"policy": spec.policy, "trajectory": number, "window": t, "samples": beyond})
    together = _nothing()
    for found in policies.values():
        for name, value in found.items():
            together[name] = max(together[name], value) if name.startswith("worst") else together[name] + value
    allowed = together["different"] <= ALLOWED * together["windows"] and together["worst_quanta"] <= 1
    identical = not together["different"] and not together["reasons_different"]
    figures = {"schema": FORMAT, **together, "cpu_s": round(time.process_time() - began, 1)}
    return {**figures, "within_limits": allowed, "identical": identical, "first": first, "policies": policies}


def _nothing() -> dict[str, Any]:
    counted = ("windows", "sizes", "different", "within_one_quantum", "reasons_different", "worst", "worst_quanta")
    return dict.fromkeys(counted, 0)


def _compare(found: dict[str, Any], recorded: Array, sizes: Array, quantum: int, other: bool) -> int:
    """Count one decision; the largest difference in samples."""
    found["windows"] += 1
    found["sizes"] += recorded.size
    found["reasons_different"] += other
    alike = sizes.shape == recorded.shape
    worst = int(np.abs(sizes - recorded).max()) if alike else int(recorded.max())
    found["different"] += worst > 0
    found["within_one_quantum"] += 0 < worst <= quantum
    found["worst"] = max(found["worst"], worst)
    found["worst_quanta"] = max(found["worst_quanta"], -(-worst // quantum))
    return worst


def main(arguments: Sequence[str]) -> None:
    """record or replay, and a file; prints JSON."""
    action, file = arguments
    print(json.dumps({"record": record, "replay": replay}[action](Path(file))))


if __name__ == "__main__":
    main(sys.argv[1:])
