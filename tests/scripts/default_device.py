"""Train where `torch.set_default_device` names another device than the model's.

Tensors of the library without an explicit device would be on "meta", which stands for GPUs and has no data.
Arguments: a folder, and optionally another device than "meta".
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib

folder, device = sys.argv[1], (*sys.argv, "meta")[2]
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs @ torch.randn(8, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
torch.set_default_device(device)
job = distrib.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
losses = []
for epoch in range(job.restore(f"{folder}/state.pt", model=model, optimizer=optimizer).get("epoch", 0), 12):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    job.save(f"{folder}/state.pt", model=model, optimizer=optimizer, epoch=epoch + 1)
    job.log(epoch=epoch, loss=losses[-1])
told = job.all_reduce(sum(losses[-8:]))
if job.is_main:
    print(json.dumps({"first": losses[0], "last": told / 8, "device": str(torch.get_default_device())}))
