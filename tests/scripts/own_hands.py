"""Change gradients, parameters and layers by hand, and print the results: `own_hands.py [NAME ...]`."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import distrib

warnings.simplefilter("ignore")  # torch.nn.utils.weight_norm is deprecated


class Functional(nn.Module):
    """A layer that is called in the first step, and later used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.calls = nn.Linear(8, 8), nn.Linear(8, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        layer = self.layer
        hidden = layer(x) if self.calls < 2 else functional.linear(x, layer.weight, layer.bias)
        return self.out(torch.tanh(hidden))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(16, 1)))


MODELS = {
    "norm": normed,
    "functional": Functional,
    "clamp": plain,
    "clamp by data": plain,
    "clip": plain,
    "init": plain,
}


def train(job: distrib.Job, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(TensorDataset(x, 10 * x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    if name == "init":
        with torch.no_grad():
            model[0].bias.fill_(0.5)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), targets).backward()
            if name.startswith("clamp"):
                for parameter in model.parameters():
                    (parameter.grad if name == "clamp" else parameter.grad.data).clamp_(-0.01, 0.01)
            optimizer.step()
            if name == "clip":
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
    model.eval()
    with torch.no_grad():
        job.print(name, f"{functional.mse_loss(model(x), 10 * x.sum(1, keepdim=True)).item():.6f}")


with distrib.init() as job:
    for name in sys.argv[1:]:
        train(job, name)
