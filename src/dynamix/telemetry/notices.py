"""Events of a run besides decisions: guards, failures, lost lines, changes of synchronisation, restarts, pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

MOST = 200  # notices that are kept; further ones are only counted
MOST_PAUSES = 3  # of them: a job that evaluates after each epoch has many

_REASONS = {
    "worse": "the policy had lost more than its patience",
    "refused": "its answer looked less than half as good",
    "fault": "it failed",
}


@dataclass(frozen=True)
class Notice:
    """An event at `at_s`, in words; `kind` is one word to count by."""

    at_s: float
    window: int
    kind: str
    text: str


class Notices:
    """Collects notices from the lines of one run: the first `MOST`, and how many there were of each kind."""

    def __init__(self) -> None:
        self.kept: list[Notice] = []
        self.counts: Counter[str] = Counter()
        self._guard: dict[str, Any] = {}
        self._way = ""
        self._interval: Any = None

    def note(self, at_s: float, window: int, kind: str, text: str) -> None:
        """Add a notice."""
        self.counts[kind] += 1
        if len(self.kept) < MOST and (kind != "pause" or self.counts[kind] <= MOST_PAUSES):
            self.kept.append(Notice(at_s, window, kind, text))

    def of_line(self, fields: dict[str, Any], at_s: float, window: int) -> None:
        """Add the notices of one line."""
        decision = fields.get("decision")
        if decision == "late":
            self.note(at_s, window, "late", "The policy was not done in time; sizes stayed as they were.")
        elif decision == "failed":
            self.note(at_s, window, "failed", "The policy failed; sizes stayed as they were.")
        if (dropped := fields.get("dropped")) is not None:
            self.note(at_s, window, "dropped", f"{dropped} lines could not be written so far: windows are missing.")
        self._of_guard(fields.get("guard"), at_s, window)
        self._of_rounds(fields.get("rounds"), at_s, window)

    def _of_guard(self, guard: Any, at_s: float, window: int) -> None:
        if not isinstance(guard, dict):
            return
        before, self._guard = self._guard, guard
        reason = guard.get("reason")
        taken = guard.get("by") == "rule" and before.get("by") != "rule"
        if taken and reason in _REASONS:
            self.note(at_s, window, "guard", f"The goodput rule took over from the policy: {_REASONS[reason]}.")
        if before.get("by") == "rule" and before.get("reason") in _REASONS and guard.get("by") == "policy":
            self.note(at_s, window, "guard", "The policy decides again.")
        if guard.get("error") and guard.get("error") != before.get("error"):
            self.note(at_s, window, "fault", f"The policy {guard['error']}.")

    def _of_rounds(self, rounds: Any, at_s: float, window: int) -> None:
        if not isinstance(rounds, dict) or rounds.get("meet") not in ("gradients", "parameters"):
            return
        if self._way and rounds["meet"] != self._way:
            why = f": {rounds['why']}" if rounds.get("why") else ""
            self.note(at_s, window, "meeting", f"From here workers average {rounds['meet']}{why}.")
        self._way = rounds["meet"]
