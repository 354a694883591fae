"""Advice on how to write a loop; error messages quote it."""

STEP = "call controller.step() once for every batch, at the end of the loop's body and before any `continue`"
ACCUMULATE = (
    "to accumulate gradients over A batches (A may be all of an epoch), write Controller(accumulate=A), run each of "
    "them under `with controller.piece():` (or all but the last under `with model.no_sync():`), call optimizer.step() "
    "after the last one, and controller.step() after every batch"
)
LOCAL = (
    "put forward passes without a backward pass, such as evaluation, under torch.no_grad(), and leave DDP's "
    "require_backward_grad_sync and FSDP's set_requires_gradient_sync() alone"
)
DUE = "write `if controller.optimizer_due: optimizer.step()`"
EARLY = "leave a loop early only when controller.optimizer_due is true, after the same optimizer step on all ranks"
ORDER = (
    "train the batches in the order in which the loader gives them, each followed by its own controller.step(); "
    "the sampler shuffles already"
)
PASS_OVER = (
    "call controller.step() also for a batch that you skip, or remove its samples from the data set. A loop that reads "
    "batches ahead must read the same number ahead from the first step of the epoch"
)
SHORT = (
    "the loop stopped at an old len(loader): batch sizes have changed since, and {} samples of the epoch were not "
    "trained. Iterate the loader to its end, or until controller.epoch_done, or use the adapter in dynamix.integrations"
)
BY_HAND = (
    "only loss.backward() through the DDP module averages a gradient over the ranks; a gradient of torch.autograd.grad "
    "or torch.func, or one set by hand, stays on its rank. To apply a gradient again, leave it in `.grad` unchanged"
)
REPEATED = (
    "the epoch is over, and the loop trains its batches again: itertools.cycle(loader), or a list of batches, repeats "
    "old batches. Write `for epoch in range(epochs):` around `for batch in loader:`"
)
FOREIGN = (
    "the loop's batches do not come from this controller, so their gradients have no weights: iterate "
    "controller.loader(loader), or DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset))"
)
ONCE = "train each batch before you call controller.step() for it, with one optimizer step or several"
WRAP_ONCE = "write controller.wrap(model, optimizer) once for each model, with an optimizer of that model only"
