"""Copies of a wrapped model: averages of weights, twins for evaluation, models that were saved whole."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import dynamix


def test_a_copy_of_a_model_and_one_that_was_saved_whole_are_not_the_job_s() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 3), torch.randn(64, 2))
    controller = dynamix.Controller("lb_bsp", batch_size=8)
    loader = DataLoader(data, batch_sampler=controller.batch_sampler(data))
    model = controller.wrap(net, optimizer)
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    twins = [copy.deepcopy(model), torch.load(kept, weights_only=False), AveragedModel(model)]
    for x, y in loader:
        for twin in twins:
            F.mse_loss(twin(x), y).backward()  # a second pass of the model itself would be an error
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
    controller.close()
    x = data.tensors[0]
    assert all(torch.equal(twin(x), twins[0](x)) for twin in twins)
    assert not torch.equal(model(x), twins[0](x))
