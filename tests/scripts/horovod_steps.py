"""Train a linear model for a few steps as Horovod's documentation does, without distrib."""

import time

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())  # different seeds: the broadcast must have an effect

total = hvd.allreduce(torch.ones(1000) * (hvd.rank() + 1), op=hvd.Sum, name="total")
assert torch.equal(total, torch.full((1000,), hvd.size() * (hvd.size() + 1) / 2))

model = torch.nn.Linear(1000, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
begin = time.perf_counter()
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(32, 1000)).square().mean().backward()
    optimizer.step()
seconds = time.perf_counter() - begin

weights = hvd.allgather(model.weight.detach().sum().reshape(1))
assert torch.all(weights == weights[0]), weights
print(
    f"rank {hvd.rank()} of {hvd.size()}, local rank {hvd.local_rank()} of {hvd.local_size()}, 10 steps in {seconds:.2f} s"
)
