"""Advice on what to write in a loop, in the words of errors."""

STEP = "call controller.step() once for every batch, at the end of the loop's body and before any `continue`"
ACCUMULATE = (
    "to accumulate gradients over A batches (A may be all of an epoch) write Controller(accumulate=A), put all but the "
    "last of them under `with model.no_sync():`, and call optimizer.step() with the last one, controller.step() after "
    "each"
)
LOCAL = (
    "put forward passes without a backward pass, such as evaluation, under torch.no_grad(), and leave DDP's "
    "require_backward_grad_sync and FSDP's set_requires_gradient_sync() alone"
)
DUE = "call it where `controller.optimizer_due` says so: `if controller.optimizer_due: optimizer.step()`"
EARLY = "leave a loop early only where controller.optimizer_due, after the same optimizer step on all ranks"
ORDER = (
    "train the batches in the order in which the loader gives them, each followed by its own controller.step(); "
    "the sampler shuffles already"
)
PASS_OVER = (
    "call controller.step() for a batch that is passed over, or leave it out of the data set; a loop that reads ahead "
    "for good reads as many batches ahead from the epoch's first step on"
)
SHORT = (
    "the loop went by len(loader), which was asked before sizes moved, and left {} of the epoch's samples: iterate the "
    "loader to its end, ask controller.epoch_done, or take the adapter in dynamix.integrations"
)
BY_HAND = (
    "loss.backward(), through the DDP module, makes a gradient that every rank weighs and adds; torch.autograd.grad, "
    "torch.func and a gradient set by hand stay on the rank. One that is applied again is left in `.grad` as it is"
)
REPEATED = (
    "the loader's epoch is over and its batches come again: itertools.cycle(loader), or a list of batches, gives what "
    "was trained already. Write `for epoch in range(epochs):` around `for batch in loader:`"
)
FOREIGN = (
    "the loop's batches do not come from this controller, so their gradients have no weights: iterate "
    "controller.loader(loader), or DataLoader(dataset, batch_sampler=controller.batch_sampler(dataset))"
)
ONCE = "train each batch before its controller.step(), in as many updates as you like"
WRAP_ONCE = "write controller.wrap(model, optimizer) once for each model, with the optimizer of that model alone"
