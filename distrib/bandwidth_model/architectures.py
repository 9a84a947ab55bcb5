"""Arithmetic of neural networks: each parameter with its size and multiply-adds, in the order of the forward pass."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

import msgspec

Checkpointing = Literal["none", "selective", "full"]
"""Activation checkpointing. `full`: backward computes each block again from its input. `selective`: half of the activations are kept,
and half of the matrix products are done again, as in torchtitan, which keeps attention and every second product.
"""


BLOCK_NAME = re.compile(r"(.*?\.\d+)\.")
"""Up to the first number of a parameter's name: `model.layers.3` of `model.layers.3.mlp.up.weight`."""


class LayerParameter(NamedTuple):
    """A parameter tensor; `products`: multiply-adds of its layer in the forward pass of one sample, `scores` of them of attention."""

    name: str
    elements: int
    products: int = 0
    scores: int = 0


class Activations(NamedTuple):
    """Tensors that a part of a network keeps from the forward pass of a sample for the backward pass."""

    computed: int
    """Elements in the type of the products: 16 bits with autocast, else 32."""
    single: int = 0
    """Elements that have 32 bits with autocast too, such as the input of a layer normalisation."""
    fixed_bytes: int = 0
    """Bytes of masks and indices."""

    def size(self, element_bytes: int) -> int:
        """Return the bytes.

        Args:
            element_bytes: Bytes of an element of the products.
        """
        return element_bytes * self.computed + 4 * self.single + self.fixed_bytes


class Block(NamedTuple):
    """A repeated part of a network that can be computed again from its input: kept activations, and the input among them."""

    kept: Activations
    input: Activations


class NetworkArithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """The arithmetic of one sample.

    `tail_products`: multiply-adds of final layers without own parameters, such as a classifier that shares the embedding, which has
    `tail_elements`. `others`: activations outside of `blocks`. `backward_elements`: temporary at the start of the backward pass.
    """

    parameters: tuple[LayerParameter, ...]
    blocks: tuple[Block, ...] = ()
    others: Activations
    backward_elements: int = 0
    tail_products: int = 0
    tail_elements: int = 0

    def activation_bytes(self, element_bytes: int, *, checkpointing: Checkpointing = "none") -> int:
        """Return the bytes that forward keeps for backward.

        Args:
            element_bytes: Bytes of an element of the products: 2 with autocast, else 4.
            checkpointing: `full` keeps only the inputs of the blocks, and one block at a time; `selective` half of the rest.
        """
        kept = [block.kept.size(element_bytes) for block in self.blocks]
        inputs = [block.input.size(element_bytes) for block in self.blocks]
        largest = max((whole - own for whole, own in zip(kept, inputs, strict=True)), default=0)
        blocks = {
            "none": sum(kept),
            "selective": (sum(inputs) + sum(kept)) // 2,
            "full": sum(inputs) + largest,
        }[checkpointing]
        return blocks + self.others.size(element_bytes)

    @property
    def product_elements(self) -> int:
        """The number of weights in products; a shared one counts once, if the tail has it."""
        return self.tail_elements + sum(parameter.elements for parameter in self.parameters if parameter.products)

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

    def step_flop(self, checkpointing: Checkpointing) -> int:
        """Return the operations of forward and backward of a sample, with those that checkpointing repeats.

        Args:
            checkpointing: `full` repeats all of the blocks, `selective` half of their matrix products and no attention.
        """
        inside = [one for one in self.parameters if BLOCK_NAME.match(one.name)]
        if checkpointing == "none" or not self.blocks:
            return self.training_flop
        if checkpointing == "full":
            return self.training_flop + 2 * sum(one.products for one in inside)
        return self.training_flop + sum(one.products - one.scores for one in inside)


class _Convolutions:
    """Builder of convolutional networks."""

    def __init__(self) -> None:
        self.parameters: list[LayerParameter] = []
        self.outputs = 0
        """Elements of the convolutions' outputs, without those of shortcuts."""

    def add_convolution(
        self, name: str, width: int, inputs: int, outputs: int, side: int, *, bias: bool, groups: int = 1
    ) -> None:
        """Add a convolution."""
        weights = width * width * inputs // groups * outputs
        self.parameters.append(LayerParameter(f"{name}.weight", weights, weights * side * side))
        if bias:
            self.parameters.append(LayerParameter(f"{name}.bias", outputs))
        self.outputs += outputs * side * side

    def take_outputs(self) -> int:
        """Return the elements of the outputs since the last call."""
        taken, self.outputs = self.outputs, 0
        return taken

    def add_norm(self, name: str, channels: int) -> None:
        """Add a batch normalisation."""
        self.parameters += [LayerParameter(f"{name}.weight", channels), LayerParameter(f"{name}.bias", channels)]

    def add_dense(self, name: str, inputs: int, outputs: int) -> None:
        """Add a dense layer."""
        self.parameters += _dense(name, inputs, outputs)


def resnet(blocks: tuple[int, ...], classes: int = 1000, groups: int = 1, group_width: int = 64) -> NetworkArithmetic:
    """Build a bottleneck ResNet (He et al. 2015, arXiv:1512.03385) as in torchvision, for images of 224 x 224.

    Args:
        blocks: Blocks of each stage.
        classes: Classes.
        groups: Groups of the middle convolutions; more than 1 in ResNeXt (Xie et al. 2016, arXiv:1611.05431).
        group_width: Channels of a group in the first stage.
    """
    layers = _Convolutions()
    layers.add_convolution("conv1", 7, 3, 64, 112, bias=False)
    layers.add_norm("bn1", 64)
    # Kept: the image, the convolution before and after normalisation, and indices of the pooled elements.
    stem = Activations(3 * 224 * 224 + 2 * layers.take_outputs(), fixed_bytes=8 * 64 * 56 * 56)
    kept = []
    inputs, side = 64, 56
    for stage, count in enumerate(blocks):
        width, wide = groups * group_width << stage, 256 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            narrower = side if block or not stage else side // 2
            for number, (size, before, after, out) in enumerate(
                [(1, inputs, width, side), (3, width, width, narrower), (1, width, wide, narrower)], 1
            ):
                layers.add_convolution(
                    f"{name}.conv{number}", size, before, after, out, bias=False, groups=groups if number == 2 else 1
                )
                layers.add_norm(f"{name}.bn{number}", after)
            # Each convolution before and after normalisation. After the last one it is the next block's input.
            output = wide * narrower * narrower
            elements = 2 * layers.take_outputs() - output
            if not block:
                layers.add_convolution(f"{name}.downsample.0", 1, inputs, wide, narrower, bias=False)
                layers.add_norm(f"{name}.downsample.1", wide)
                elements += layers.take_outputs()
            before = inputs * (56 * 56 if not (stage or block) else side * side)
            kept.append(Block(Activations(before + elements), Activations(before)))
            inputs, side = wide, narrower
    layers.add_dense("fc", inputs, classes)
    last = Activations(inputs * (side * side + 1), classes, fixed_bytes=8)
    return NetworkArithmetic(
        parameters=tuple(layers.parameters), blocks=tuple(kept), others=_sum_activations(stem, last)
    )


def vgg(stages: tuple[int, ...], classes: int = 1000) -> NetworkArithmetic:
    """Build a VGG without batch normalisation (Simonyan and Zisserman 2014, arXiv:1409.1556), for images of 224 x 224.

    Args:
        stages: Convolutions of each stage.
        classes: Classes.
    """
    layers = _Convolutions()
    inputs, side, pooled = 3, 224, 0
    for stage, count in enumerate(stages):
        outputs = min(64 << stage, 512)
        for _ in range(count):
            layers.add_convolution(f"features.{len(layers.parameters) // 2}", 3, inputs, outputs, side, bias=True)
            inputs = outputs
        side //= 2
        pooled += inputs * side * side
    for number, (before, after) in enumerate([(inputs * side * side, 4096), (4096, 4096), (4096, classes)]):
        layers.add_dense(f"classifier.{3 * number}", before, after)
    # Kept: the image, each convolution after its ReLU, pooled elements with their indices, and dense layers around their dropout.
    elements = 3 * 224 * 224 + layers.outputs + pooled + inputs * side * side + 2 * 2 * 4096
    return NetworkArithmetic(
        parameters=tuple(layers.parameters),
        others=Activations(elements, classes, fixed_bytes=8 * pooled + 2 * 4096 + 8),
    )


EFFICIENTNET_STAGES = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
)  # fmt: skip
"""Stages of EfficientNet-B0: expansion, kernel, stride, channels, blocks (arXiv:1905.11946, table 1)."""


def efficientnet(width: float, depth: float, side: int, classes: int = 1000) -> NetworkArithmetic:
    """Build an EfficientNet (Tan and Le 2019, arXiv:1905.11946) as in torchvision.

    Args:
        width: Factor of the channels of B0.
        depth: Factor of the blocks of each stage.
        side: Side of the images.
        classes: Classes.
    """
    layers = _Convolutions()
    inputs, side = _channels(32 * width), -(-side // 2)
    layers.add_convolution("features.0.0", 3, 3, inputs, side, bias=False)
    layers.add_norm("features.0.1", inputs)
    # Kept: each convolution before and after normalisation, and after its activation function where it has one.
    stem = Activations(3 * (2 * side) ** 2 + 3 * layers.take_outputs())
    kept = []
    for stage, (expansion, kernel, first_stride, base, blocks) in enumerate(EFFICIENTNET_STAGES, 1):
        outputs = _channels(base * width)
        for block in range(math.ceil(blocks * depth)):
            name, stride = f"features.{stage}.{block}", 1 if block else first_stride
            before, wide, narrower = inputs * side * side, expansion * inputs, -(-side // stride)
            if expansion > 1:
                layers.add_convolution(f"{name}.expand", 1, inputs, wide, side, bias=False)
                layers.add_norm(f"{name}.expand_norm", wide)
            layers.add_convolution(f"{name}.depthwise", kernel, wide, wide, narrower, bias=False, groups=wide)
            layers.add_norm(f"{name}.depthwise_norm", wide)
            computed = 3 * layers.take_outputs() + wide * narrower * narrower  # and scaled by squeeze and excitation
            squeezed = max(1, inputs // 4)
            layers.add_dense(f"{name}.squeeze", wide, squeezed)
            layers.add_dense(f"{name}.excite", squeezed, wide)
            layers.add_convolution(f"{name}.project", 1, wide, outputs, narrower, bias=False)
            layers.add_norm(f"{name}.project_norm", outputs)
            computed += layers.take_outputs()  # after normalisation it is the next block's input
            kept.append(Block(Activations(before + computed), Activations(before)))
            inputs, side = outputs, narrower
    layers.add_convolution("features.8.0", 1, inputs, 4 * inputs, side, bias=False)
    layers.add_norm("features.8.1", 4 * inputs)
    last = Activations(inputs * side * side + 3 * layers.take_outputs() + 4 * inputs, classes, fixed_bytes=8)
    layers.add_dense("classifier", 4 * inputs, classes)
    return NetworkArithmetic(
        parameters=tuple(layers.parameters), blocks=tuple(kept), others=_sum_activations(stem, last)
    )


def _channels(count: float) -> int:
    """Round channels to a multiple of 8, as EfficientNet does: never by more than 10 % down."""
    rounded = max(8, int(count + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * count else rounded


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
    features = tokens * width
    return NetworkArithmetic(
        parameters=tuple(parameters),
        blocks=(_kept_by_block(width, heads, tokens),) * layers,
        # The last normalisation and its input, the logarithms of the probabilities, a mask, and the tokens with their successors.
        others=Activations(features, features + tokens * words, fixed_bytes=features + 2 * 8 * tokens),
        backward_elements=2 * tokens * words,
        tail_products=tokens * width * words,
        tail_elements=width * words,
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
    features = tokens * width
    return NetworkArithmetic(
        parameters=tuple(parameters),
        blocks=(_kept_by_block(width, heads, tokens),) * layers,
        # The head has a dense layer, its activation function and a normalisation before the logits.
        others=Activations(3 * features, 2 * features + tokens * words, fixed_bytes=features + 2 * 8 * tokens),
        backward_elements=2 * tokens * words,
        tail_products=tokens * width * words,
        tail_elements=width * words,
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
    features = tokens * width
    return NetworkArithmetic(
        parameters=tuple(parameters),
        blocks=(_kept_by_block(width, heads, tokens),) * layers,
        others=Activations(3 * 224 * 224 + width, features + classes, fixed_bytes=features + 8),
    )


def _block(name: str, width: int, tokens: int) -> list[LayerParameter]:
    """List the parameters of a transformer layer: attention and an MLP four times as wide."""
    scores = 2 * tokens * tokens * width  # queries with keys, and weights with values
    weight, bias = _dense(f"{name}.attention.qkv", width, 3 * width, times=tokens)
    return [
        *_scale(f"{name}.norm1", width),
        weight._replace(products=weight.products + scores, scores=scores),
        bias,
        *_dense(f"{name}.attention.out", width, width, times=tokens),
        *_scale(f"{name}.norm2", width),
        *_dense(f"{name}.mlp.in", width, 4 * width, times=tokens),
        *_dense(f"{name}.mlp.out", 4 * width, width, times=tokens),
    ]


def _kept_by_block(width: int, heads: int, tokens: int) -> Block:
    """Count the activations of a transformer layer per sequence, after Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1.

    That article counts 34 bytes per feature and 5 per attention score in 16 bits. Here attention is torch's fused one, which keeps a sum
    per row in place of the scores, and autocast keeps the inputs of the two normalisations in 32 bits: 38 bytes per feature.
    """
    features = tokens * width
    # Inputs of attention and MLP, queries, keys, values, their result, and the MLP before and after its activation function.
    computed = features * (1 + 3 + 1 + 1 + 4 + 4)
    # Masks of two dropouts, the sums of attention, and means and deviations of two normalisations.
    fixed_bytes = 2 * features + 4 * heads * tokens + 16 * tokens
    return Block(Activations(computed, 2 * features, fixed_bytes), Activations(0, features))


def _sum_activations(one: Activations, other: Activations) -> Activations:
    return Activations(*(a + b for a, b in zip(one, other, strict=True)))


def _dense(name: str, inputs: int, outputs: int, *, times: int = 1) -> list[LayerParameter]:
    return [
        LayerParameter(f"{name}.weight", inputs * outputs, inputs * outputs * times),
        LayerParameter(f"{name}.bias", outputs),
    ]


def _scale(name: str, width: int) -> list[LayerParameter]:
    return [LayerParameter(f"{name}.weight", width), LayerParameter(f"{name}.bias", width)]
