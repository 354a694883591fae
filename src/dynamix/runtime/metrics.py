"""A job's figures for a logger, as one rank knows them at any time. No collective call, no waiting for a device."""

from dynamix.runtime.decide.window_closer import WindowCloser
from dynamix.runtime.rate.rates import Rates

# Name -> meaning. Unknown values are NaN. "This rank": other ranks have other values.
METRICS = {
    "step": "optimizer steps of the job",
    "samples": "samples that all workers have trained on",
    "epoch": "epoch under way, from 0",
    "progress": "part of the epoch's samples that is done, 0 to 1",
    "batch_size": "samples of this rank in the coming optimizer step",
    "global_batch": "samples of all workers in the coming optimizer step",
    "steps_apart": "a worker's optimizer steps until workers meet over parameters, in the mean; 0: over gradients",
    "lr_factor": "what lr_rule multiplies the learning rate by",
    "noise_scale": "gradient noise scale in samples, smoothed, as all ranks know it",
    "windows": "windows that were answered",
    "changes": "times the sizes changed since this process began",
    "compute_s": "this rank's seconds of computing per optimizer step, in its last window",
    "exchange_s": "this rank's seconds of waiting and communicating per optimizer step, in its last window",
    "data_s": "this rank's seconds before the forward pass, such as loading, per optimizer step, in its last window",
    "loss": "this rank's mean loss in its last window",
    "accuracy": "this rank's mean accuracy in its last window, 0 to 1",
    "pauses": "this rank's steps left out of its times because somebody paused, since this process began",
    "unread": "losses, logits and targets of this rank that could not be read, since this process began",
    "overhead_s": "this rank's seconds in controller.step() per optimizer step, since this process began",
}


def metrics_of(windows: WindowCloser, rates: Rates, overhead_s: float) -> dict[str, float]:
    """The values of `METRICS`, in the same order; `overhead_s`: seconds in all calls of `step`."""
    nan = float("nan")
    progress, source, recorder = windows.progress, windows.source, windows.recorder
    sizes, rate = windows.batch_sizes, next(iter(rates.learning_rates), None)
    apart, piece = windows.meeting.local(windows.piece_apart)
    noise, signal = progress.noise_at(windows.next_round)
    found = recorder.last | {
        "step": progress.steps,
        "samples": progress.samples,
        "epoch": nan if source is None else source.epoch,
        "progress": nan if source is None else source.progress,
        "batch_size": sizes[windows.ranks.rank],
        "global_batch": sizes.sum(),
        "steps_apart": (sizes.sum() / (piece * sizes.size) if piece else 1.0) if apart else 0.0,
        "lr_factor": 1.0 if rate is None else rate.factor,
        "noise_scale": noise / signal if signal > 0 else nan,
        "windows": progress.window,
        "changes": windows.changes,
        "pauses": recorder.times.pauses,
        "unread": recorder.reader.unread,
        "overhead_s": overhead_s / recorder.timer.step if recorder.timer.step else nan,
    }
    return {name: float(found.get(name, nan)) for name in METRICS}
