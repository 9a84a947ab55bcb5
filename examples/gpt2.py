"""Shared code of train_gpt2: the model, a file of tokens, and options."""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import prepare_tokens
import recipe
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset


class Shape(NamedTuple):
    """Size of the model. The default is GPT-2 small, whose vocabulary is rounded up to a multiple of 64."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50304


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a normalization and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_in, self.feed_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2: tokens and targets [batch, context] to the mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("projection.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def flops_per_token(shape: Shape) -> int:
    """Return the FLOPs of training on one token: 6 per parameter, position embeddings excluded, and attention's (arXiv:2204.02311)."""
    layer = 12 * shape.width**2 + 13 * shape.width
    parameters = shape.vocabulary * shape.width + shape.layers * layer + 2 * shape.width
    return 6 * parameters + 12 * shape.layers * shape.width * shape.context


def adamw(model: nn.Module, lr: float, device: torch.device) -> torch.optim.AdamW:
    """Create the optimizer: fused on GPUs, weight decay for matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=device.type == "cuda")


class TokenFile(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of `context` tokens and their targets, in a file of uint16 that each process maps into its memory."""

    def __init__(self, path: Path, context: int) -> None:
        self.path, self.context = path, context

    @cached_property
    def tokens(self) -> Any:
        return numpy.memmap(self.path, dtype=numpy.uint16, mode="r")

    def __len__(self) -> int:
        return (self.path.stat().st_size // 2 - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self.context
        block = torch.from_numpy(self.tokens[begin : begin + self.context + 1].astype(numpy.int64))
        return block[:-1], block[1:]


def loaders(args: argparse.Namespace, device: torch.device) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Create the loaders for training and for validation, which reads the last blocks of the file."""
    blocks = TokenFile(args.data, args.shape.context)
    held_out = max(1, min(len(blocks) // 20, args.validation_blocks))
    training = Subset(blocks, range(len(blocks) - held_out))
    validation = Subset(blocks, range(len(blocks) - held_out, len(blocks)))
    options: dict[str, Any] = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    options["pin_memory"] = device.type == "cuda"
    order = recipe.Shuffle(len(training), args.seed)
    return (
        DataLoader(training, args.batch_size, sampler=order, drop_last=True, **options),
        DataLoader(validation, args.batch_size, **options),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, args: argparse.Namespace, device: torch.device) -> tuple[float, int]:
    """Return the sum of the losses of the blocks in `loader`, and the number of blocks."""
    model.eval()
    total, blocks = 0.0, 0
    for tokens, targets in loader:
        with recipe.autocast(args, device):
            total += model(tokens.to(device), targets.to(device)).item() * len(tokens)
        blocks += len(tokens)
    model.train()
    return total, blocks


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the options of a training script, and make a small file of tokens for `--smoke`."""
    options = recipe.parser(description, batch_size=32, lr=6e-4, checkpoint="gpt2.pt")
    options.add_argument("--data", type=Path, default=Path("tokens.bin"), help="tokens of uint16, as prepare_tokens.py")
    options.add_argument("--steps", type=int, default=5000)
    options.add_argument("--warmup-steps", type=int, default=250)
    options.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    options.add_argument("--validation-blocks", type=int, default=1024)
    for name in ("layers", "heads", "width", "context"):
        options.add_argument(f"--{name}", type=int, default=Shape._field_defaults[name])
    tiny = {"layers": 2, "heads": 2, "width": 64, "context": 64, "batch_size": 8, "lr": 3e-3, "validation_blocks": 32}
    short = {"steps": 20, "warmup_steps": 5, "save_every": 10, "checkpoint": Path("gpt2-smoke.pt")}
    args = recipe.parse(options, data=Path("tokens-smoke.bin"), **tiny, **short)
    if args.smoke and not args.data.exists():
        prepare_tokens.write(args.data, prepare_tokens.topics())
    if not args.data.is_file():
        sys.exit(f"--data {args.data}: no such file; examples/prepare_tokens.py makes one")
    about = args.data.with_suffix(".json")
    vocabulary = json.loads(about.read_text())["vocabulary"] if about.exists() else Shape().vocabulary
    args.shape = Shape(args.layers, args.heads, args.width, args.context, vocabulary)
    return args
