"""What a job is made of: parts, which hear what happens to its rounds, and own their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamix.data.plan import Piece, Round


@dataclass(frozen=True, slots=True)
class Observation:
    """What the loop told of a batch that is done.

    loss, logits, target   as `Controller.step` got them
    count                  samples that the mean loss is over, as the loop says; None: it does not
    applied                the weight that was in the loss, None if the hook had to apply it
    given                  losses carry their weights without the controller
    """

    loss: Any = None
    logits: Any = None
    target: Any = None
    count: int | None = None
    applied: Any = None
    given: bool = False


class Part:
    """A part of a job. It hears events in the order in which parts were added to the job, and owns its state.

    Every event has a default that does nothing, and only parts that override one are called. A part knows no other
    part: what it needs it is given in its constructor.

    name   of its state in a checkpoint; empty: it has none
    own    every rank has another state, so that a checkpoint holds one for each; None is loaded if it lacks this rank's
    """

    name = ""
    own = False

    def pass_begins(self, piece: Piece) -> None:
        """A forward pass that records gradients begins, of the batch in hand."""

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        """`controller.step()`: the batch in hand is done."""

    def round_done(self, done: Round) -> None:
        """The last batch of a round is done."""

    def job_ends(self) -> None:
        """The controller is closed: let go of what is the user's."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, arrays and tensors by name."""
        return {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` unless `load_state_dict` could take `state`; changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was checked."""


def heard(parts: Iterable[Part], event: str) -> tuple[Callable[..., None], ...]:
    """The methods of `parts` for `event`, in order, of those that override its default.

    >>> class Counts(Part):
    ...     def round_done(self, done: Round) -> None: ...
    >>> len(heard([Part(), Counts()], "round_done")), len(heard([Part(), Counts()], "job_ends"))
    (1, 0)
    """
    default = getattr(Part, event)
    return tuple(getattr(part, event) for part in parts if getattr(type(part), event) is not default)
