"""Estimated memory of a step: parts counted on real tensors, the peak by torch's tracker, and out-of-memory errors."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distrib
from distrib.bandwidth_model.architectures import gpt2
from distrib.bandwidth_model.memory_estimate import network_memory
from distrib.errors import TrainingError
from distrib.training.out_of_memory import missing_bytes, state_bytes

pytestmark = pytest.mark.usefixtures("inductor_cache")

WIDTH, HEADS, TOKENS, WORDS = 128, 2, 1024, 2000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).split(WIDTH, 2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class SmallGpt(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def estimate(batch: int, **options):
    model = SmallGpt()
    tokens = torch.zeros(batch, TOKENS, dtype=torch.long)

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    optimizer = torch.optim.AdamW(model.parameters())
    found = distrib.estimate_memory(model, (tokens, tokens.clone()), loss, optimizer=optimizer, **options)
    assert all(parameter.grad is None for parameter in model.parameters()) and not optimizer.state
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_language_model_agrees_with_the_arithmetic_of_the_catalogue(precision):
    network = gpt2(2, WIDTH, HEADS, TOKENS, WORDS)
    expected = network_memory(network, batch=2, half=precision != "fp32", moments=2, step_copies=1, ranks=2)
    found = estimate(2, precision=precision, ranks=2)
    for name, size in expected.parts.items():
        assert found.parts[name] == pytest.approx(size, rel=0.005), name
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)


def test_parts_and_saved_tensors_equal_those_of_a_real_step():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8192, 128),
    )
    images, labels = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    found = distrib.estimate_memory(model, (images, labels), loss, optimizer=optimizer)
    fixed = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
        return tensor

    keep(images), keep(labels)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(images, labels)
    value.backward()
    assert found.activation_bytes == sum(kept.values())
    missing = missing_bytes([model], [optimizer])
    optimizer.step()
    assert missing == state_bytes(optimizer)

    def rounded(tensors):
        return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)

    assert found.parameter_bytes == rounded([*model.parameters(), *model.buffers()])
    assert found.gradient_bytes == rounded(parameter.grad for parameter in model.parameters())
    assert found.optimizer_bytes == rounded(state["momentum_buffer"] for state in optimizer.state.values())


def test_changes_are_simulated_if_the_step_does_not_fit(monkeypatch):
    whole = estimate(4)
    monkeypatch.setattr("distrib.training.memory._device", lambda gpu: ("small GPU", whole.peak_bytes))
    found = estimate(4)
    assert found.fits is False and found.peak_bytes == whole.peak_bytes
    texts = [change.text for change in found.changes]
    assert texts == ["16-bit autocast", "batches of 2 with --accumulate 2"]
    assert all(change.peak_bytes < 0.95 * whole.peak_bytes for change in found.changes)


def test_a_loss_that_reads_values_and_an_unknown_gpu_are_refused():
    model, batch = nn.Linear(2, 1), torch.ones(3, 2)
    with pytest.raises(TrainingError, match="Linear cannot be estimated"):
        distrib.estimate_memory(model, batch, lambda x: model(x).sum() * model(x).sum().item())
    with pytest.raises(TrainingError, match="GPU9"):
        distrib.estimate_memory(model, batch, lambda x: model(x).sum(), gpu="GPU9")


def test_an_out_of_memory_error_that_ends_the_script_has_the_table(monkeypatch, request):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(str(error)))
    job = request.getfixturevalue("job")
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    job.prepare(model, optimizer)
    for error in (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ValueError("other")):
        sys.excepthook(type(error), error, None)
    assert seen[0].startswith("CUDA out of memory. Tried to allocate 2 GiB\n")
    assert "parameters" in seen[0] and "4 MB" in seen[0] and "--accumulate" in seen[0]
    assert seen[1] == "other"
    job.close()
    assert sys.excepthook(ValueError, ValueError("after"), None) is None and seen[2] == "after"


@pytest.mark.parametrize("fixed", [True, False])
def test_changes_that_the_script_cannot_compute_are_left_out(fixed):
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(20_000, 20_000) for _ in range(8)), nn.BatchNorm1d(20_000), nn.Linear(20_000, 10)
        )
        batch = torch.empty(64, 20_000), torch.empty(64, dtype=torch.long)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = model(inputs)
        return F.cross_entropy(outputs.view(64, 10) if fixed else outputs, targets)

    found = distrib.estimate_memory(model, batch, loss, gpu="K80")
    assert found.fits is False and found.changes == ()
