"""Networks by their arithmetic: every parameter with its size and the work of its layer, in the order of the forward pass."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Parameter(NamedTuple):
    """A tensor of weights; `products` are the multiply-adds of its layer's forward pass for one sample."""

    name: str
    elements: int
    products: int = 0


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample does to a network.

    `activation_elements`: what the forward pass keeps for the backward pass; `tail_products`: the work of layers that
    come last and have no parameters of their own, such as a classifier that shares the embedding's.
    """

    parameters: tuple[Parameter, ...]
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
        """Operations of a sample's forward and backward pass: two for each product, and backward twice forward's."""
        return 6 * self.forward_products


class _Convolutions:
    """Collects convolutions with what follows each."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self.outputs = 0

    def convolve(self, name: str, width: int, inputs: int, outputs: int, side: int, *, bias: bool) -> None:
        """A convolution of `width` x `width`, whose output is `side` x `side`."""
        weights = width * width * inputs * outputs
        self.parameters.append(Parameter(f"{name}.weight", weights, weights * side * side))
        if bias:
            self.parameters.append(Parameter(f"{name}.bias", outputs))
        self.outputs += outputs * side * side

    def normalise(self, name: str, channels: int) -> None:
        self.parameters += [Parameter(f"{name}.weight", channels), Parameter(f"{name}.bias", channels)]

    def connect(self, name: str, inputs: int, outputs: int) -> None:
        self.parameters += _dense(name, inputs, outputs)


def resnet(blocks: tuple[int, ...], classes: int = 1000) -> Network:
    """A ResNet of bottlenecks (He et al. 2015, arXiv:1512.03385), as torchvision has it, for images of 224 x 224."""
    layers = _Convolutions()
    layers.convolve("conv1", 7, 3, 64, 112, bias=False)
    layers.normalise("bn1", 64)
    inputs, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            narrower = side if block or not stage else side // 2
            for number, (size, before, after, out) in enumerate(
                [(1, inputs, width, side), (3, width, width, narrower), (1, width, 4 * width, narrower)], 1
            ):
                layers.convolve(f"{name}.conv{number}", size, before, after, out, bias=False)
                layers.normalise(f"{name}.bn{number}", after)
            if not block:
                layers.convolve(f"{name}.downsample.0", 1, inputs, 4 * width, narrower, bias=False)
                layers.normalise(f"{name}.downsample.1", 4 * width)
            inputs, side = 4 * width, narrower
    layers.connect("fc", inputs, classes)
    # Kept: what each convolution gave, once as the normalisation's input and once, normalised, as the next layer's.
    return Network(parameters=tuple(layers.parameters), activation_elements=2 * layers.outputs)


def vgg(stages: tuple[int, ...], classes: int = 1000) -> Network:
    """A VGG without batch normalisation (Simonyan and Zisserman 2014, arXiv:1409.1556), for images of 224 x 224."""
    layers = _Convolutions()
    inputs, side = 3, 224
    for stage, count in enumerate(stages):
        outputs = min(64 << stage, 512)
        for _ in range(count):
            layers.convolve(f"features.{len(layers.parameters) // 2}", 3, inputs, outputs, side, bias=True)
            inputs = outputs
        side //= 2
    for number, (before, after) in enumerate([(inputs * side * side, 4096), (4096, 4096), (4096, classes)]):
        layers.connect(f"classifier.{3 * number}", before, after)
    return Network(parameters=tuple(layers.parameters), activation_elements=2 * layers.outputs)


def gpt2(layers: int, width: int, heads: int, tokens: int = 1024, words: int = 50257) -> Network:
    """GPT-2 (Radford et al. 2019); the output layer shares the embedding of words."""
    parameters = [Parameter("wte.weight", words * width), Parameter("wpe.weight", 1024 * width)]
    for layer in range(layers):
        parameters += _block(f"h.{layer}", width, tokens)
    parameters += _scale("ln_f", width)
    return Network(
        parameters=tuple(parameters),
        activation_elements=layers * _kept(width, heads, tokens) + 3 * tokens * words,
        tail_products=tokens * width * words,
    )


def bert(layers: int, width: int, heads: int, tokens: int, words: int = 30522) -> Network:
    """BERT with the heads that it is pre-trained with (Devlin et al. 2018, arXiv:1810.04805)."""
    parameters = [
        Parameter("embeddings.word", words * width),
        Parameter("embeddings.position", 512 * width),
        Parameter("embeddings.kind", 2 * width),
        *_scale("embeddings.norm", width),
    ]
    for layer in range(layers):
        parameters += _block(f"layer.{layer}", width, tokens)
    parameters += _dense("pooler", width, width)
    parameters += _dense("head.transform", width, width, times=tokens)
    parameters += [*_scale("head.norm", width), Parameter("head.bias", words), *_dense("head.next", width, 2)]
    return Network(
        parameters=tuple(parameters),
        activation_elements=layers * _kept(width, heads, tokens) + 3 * tokens * words,
        tail_products=tokens * width * words,
    )


def vit(layers: int, width: int, heads: int, patch: int = 16, classes: int = 1000) -> Network:
    """A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), for images of 224 x 224."""
    patches = (224 // patch) ** 2
    tokens = patches + 1
    parameters = [
        Parameter("class_token", width),
        *_dense("conv_proj", 3 * patch * patch, width, times=patches),
        Parameter("pos_embedding", tokens * width),
    ]
    for layer in range(layers):
        parameters += _block(f"layers.{layer}", width, tokens)
    parameters += [*_scale("ln", width), *_dense("head", width, classes)]
    return Network(parameters=tuple(parameters), activation_elements=layers * _kept(width, heads, tokens))


def _block(name: str, width: int, tokens: int) -> list[Parameter]:
    """One layer of a transformer: attention, and a perceptron four times as wide."""
    scores = 2 * tokens * tokens * width  # queries with keys, and what they select of the values
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


def _kept(width: int, heads: int, tokens: int) -> int:
    """Elements of 2 bytes that a layer of a transformer keeps of one sequence (Korthikanti et al. 2022, arXiv:2205.05198)."""
    return tokens * (34 * width + 5 * heads * tokens) // 2


def _dense(name: str, inputs: int, outputs: int, *, times: int = 1) -> list[Parameter]:
    return [
        Parameter(f"{name}.weight", inputs * outputs, inputs * outputs * times),
        Parameter(f"{name}.bias", outputs),
    ]


def _scale(name: str, width: int) -> list[Parameter]:
    return [Parameter(f"{name}.weight", width), Parameter(f"{name}.bias", width)]
