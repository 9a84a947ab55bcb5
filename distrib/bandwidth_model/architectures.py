"""Arithmetic of neural networks: each parameter with its size and multiply-adds, in the order of the forward pass."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class LayerParameter(NamedTuple):
    """A parameter tensor; `products`: multiply-adds of its layer in the forward pass of one sample."""

    name: str
    elements: int
    products: int = 0


class NetworkArithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """The arithmetic of one sample.

    `activation_elements`: stored by the forward pass for the backward pass. `tail_products`: multiply-adds of final layers without
    own parameters, such as a classifier that shares the embedding.
    """

    parameters: tuple[LayerParameter, ...]
    activation_elements: int
    tail_products: int = 0

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def forward_products(self) -> int:
        """Multiply-adds of a sample's forward pass."""
        return self.tail_products + sum(parameter.products for parameter in self.parameters)

    @property
    def training_flop(self) -> int:
        """Operations of forward and backward pass of a sample: two per product, backward twice as many."""
        return 6 * self.forward_products


class _Convolutions:
    """Builder of convolutional networks."""

    def __init__(self) -> None:
        self.parameters: list[LayerParameter] = []
        self.outputs = 0

    def add_convolution(self, name: str, width: int, inputs: int, outputs: int, side: int, *, bias: bool) -> None:
        """Add a convolution."""
        weights = width * width * inputs * outputs
        self.parameters.append(LayerParameter(f"{name}.weight", weights, weights * side * side))
        if bias:
            self.parameters.append(LayerParameter(f"{name}.bias", outputs))
        self.outputs += outputs * side * side

    def add_norm(self, name: str, channels: int) -> None:
        """Add a batch normalisation."""
        self.parameters += [LayerParameter(f"{name}.weight", channels), LayerParameter(f"{name}.bias", channels)]

    def add_dense(self, name: str, inputs: int, outputs: int) -> None:
        """Add a dense layer."""
        self.parameters += _dense(name, inputs, outputs)


def resnet(blocks: tuple[int, ...], classes: int = 1000) -> NetworkArithmetic:
    """Build a bottleneck ResNet (He et al. 2015, arXiv:1512.03385) as in torchvision, for images of 224 x 224.

    Args:
        blocks: Blocks of each stage.
        classes: Classes.
    """
    layers = _Convolutions()
    layers.add_convolution("conv1", 7, 3, 64, 112, bias=False)
    layers.add_norm("bn1", 64)
    inputs, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            narrower = side if block or not stage else side // 2
            for number, (size, before, after, out) in enumerate(
                [(1, inputs, width, side), (3, width, width, narrower), (1, width, 4 * width, narrower)], 1
            ):
                layers.add_convolution(f"{name}.conv{number}", size, before, after, out, bias=False)
                layers.add_norm(f"{name}.bn{number}", after)
            if not block:
                layers.add_convolution(f"{name}.downsample.0", 1, inputs, 4 * width, narrower, bias=False)
                layers.add_norm(f"{name}.downsample.1", 4 * width)
            inputs, side = 4 * width, narrower
    layers.add_dense("fc", inputs, classes)
    # Stored: the output of each convolution before and after normalisation.
    return NetworkArithmetic(parameters=tuple(layers.parameters), activation_elements=2 * layers.outputs)


def vgg(stages: tuple[int, ...], classes: int = 1000) -> NetworkArithmetic:
    """Build a VGG without batch normalisation (Simonyan and Zisserman 2014, arXiv:1409.1556), for images of 224 x 224.

    Args:
        stages: Convolutions of each stage.
        classes: Classes.
    """
    layers = _Convolutions()
    inputs, side = 3, 224
    for stage, count in enumerate(stages):
        outputs = min(64 << stage, 512)
        for _ in range(count):
            layers.add_convolution(f"features.{len(layers.parameters) // 2}", 3, inputs, outputs, side, bias=True)
            inputs = outputs
        side //= 2
    for number, (before, after) in enumerate([(inputs * side * side, 4096), (4096, 4096), (4096, classes)]):
        layers.add_dense(f"classifier.{3 * number}", before, after)
    return NetworkArithmetic(parameters=tuple(layers.parameters), activation_elements=2 * layers.outputs)


def gpt2(layers: int, width: int, heads: int, tokens: int = 1024, words: int = 50257) -> NetworkArithmetic:
    """Build a GPT-2 (Radford et al. 2019); the output layer shares the embedding.

    Args:
        layers: Layers.
        width: Features.
        heads: Attention heads.
        tokens: Tokens of a sequence.
        words: Size of the vocabulary.
    """
    parameters = [LayerParameter("wte.weight", words * width), LayerParameter("wpe.weight", 1024 * width)]
    for layer in range(layers):
        parameters += _block(f"h.{layer}", width, tokens)
    parameters += _scale("ln_f", width)
    return NetworkArithmetic(
        parameters=tuple(parameters),
        activation_elements=layers * _activation_elements(width, heads, tokens) + 3 * tokens * words,
        tail_products=tokens * width * words,
    )


def bert(layers: int, width: int, heads: int, tokens: int, words: int = 30522) -> NetworkArithmetic:
    """Build a BERT with its pre-training heads (Devlin et al. 2018, arXiv:1810.04805).

    Args:
        layers: Layers.
        width: Features.
        heads: Attention heads.
        tokens: Tokens of a sequence.
        words: Size of the vocabulary.
    """
    parameters = [
        LayerParameter("embeddings.word", words * width),
        LayerParameter("embeddings.position", 512 * width),
        LayerParameter("embeddings.kind", 2 * width),
        *_scale("embeddings.norm", width),
    ]
    for layer in range(layers):
        parameters += _block(f"layer.{layer}", width, tokens)
    parameters += _dense("pooler", width, width)
    parameters += _dense("head.transform", width, width, times=tokens)
    parameters += [*_scale("head.norm", width), LayerParameter("head.bias", words), *_dense("head.next", width, 2)]
    return NetworkArithmetic(
        parameters=tuple(parameters),
        activation_elements=layers * _activation_elements(width, heads, tokens) + 3 * tokens * words,
        tail_products=tokens * width * words,
    )


def vit(layers: int, width: int, heads: int, patch: int = 16, classes: int = 1000) -> NetworkArithmetic:
    """Build a vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), for images of 224 x 224.

    Args:
        layers: Layers.
        width: Features.
        heads: Attention heads.
        patch: Side of a patch in pixels.
        classes: Classes.
    """
    patches = (224 // patch) ** 2
    tokens = patches + 1
    parameters = [
        LayerParameter("class_token", width),
        *_dense("conv_proj", 3 * patch * patch, width, times=patches),
        LayerParameter("pos_embedding", tokens * width),
    ]
    for layer in range(layers):
        parameters += _block(f"layers.{layer}", width, tokens)
    parameters += [*_scale("ln", width), *_dense("head", width, classes)]
    return NetworkArithmetic(
        parameters=tuple(parameters), activation_elements=layers * _activation_elements(width, heads, tokens)
    )


def _block(name: str, width: int, tokens: int) -> list[LayerParameter]:
    """List the parameters of a transformer layer: attention and an MLP four times as wide."""
    scores = 2 * tokens * tokens * width  # queries with keys, and weights with values
    weight, bias = _dense(f"{name}.attention.qkv", width, 3 * width, times=tokens)
    return [
        *_scale(f"{name}.norm1", width),
        weight._replace(products=weight.products + scores),
        bias,
        *_dense(f"{name}.attention.out", width, width, times=tokens),
        *_scale(f"{name}.norm2", width),
        *_dense(f"{name}.mlp.in", width, 4 * width, times=tokens),
        *_dense(f"{name}.mlp.out", 4 * width, width, times=tokens),
    ]


def _activation_elements(width: int, heads: int, tokens: int) -> int:
    """Count the 2-byte elements that a transformer layer stores per sequence (Korthikanti et al. 2022, arXiv:2205.05198)."""
    return tokens * (34 * width + 5 * heads * tokens) // 2


def _dense(name: str, inputs: int, outputs: int, *, times: int = 1) -> list[LayerParameter]:
    return [
        LayerParameter(f"{name}.weight", inputs * outputs, inputs * outputs * times),
        LayerParameter(f"{name}.bias", outputs),
    ]


def _scale(name: str, width: int) -> list[LayerParameter]:
    return [LayerParameter(f"{name}.weight", width), LayerParameter(f"{name}.bias", width)]
