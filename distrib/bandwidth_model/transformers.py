"""Arithmetic of transformers from their configuration: decoders such as Llama, and T5."""

from __future__ import annotations

from distrib.bandwidth_model.architectures import Activations, Block, LayerParameter, NetworkArithmetic


def decoder(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    words: int,
    tokens: int,
    *,
    head_width: int = 0,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> NetworkArithmetic:
    """Build a decoder with gated MLP, RMS normalisation and rotary embeddings, as Llama, Mistral and Qwen are.

    Args:
        layers: Layers (`num_hidden_layers`).
        width: Features (`hidden_size`).
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        mlp: Width of the MLP (`intermediate_size`).
        words: Size of the vocabulary.
        tokens: Tokens of a sequence.
        head_width: Features of a head; 0 for `width / heads`.
        tied: True if the output layer shares the embedding.
        qkv_bias: True for biases of queries, keys and values (Qwen 2.5).
        qk_norm: True for normalised queries and keys (Qwen 3).
    """
    each = head_width or width // heads
    queries, keys = heads * each, kv_heads * each
    parameters = [LayerParameter("embed_tokens.weight", words * width)]
    for layer in range(layers):
        name = f"layers.{layer}"
        parameters.append(LayerParameter(f"{name}.input_norm.weight", width))
        for part, outputs in (("q", queries), ("k", keys), ("v", keys)):
            # Queries with keys, and weights with values: counted in full, as MFU is.
            scores = 2 * tokens * tokens * queries if part == "q" else 0
            parameters.append(
                LayerParameter(
                    f"{name}.attention.{part}.weight", width * outputs, width * outputs * tokens + scores, scores
                )
            )
            parameters += [LayerParameter(f"{name}.attention.{part}.bias", outputs)] * qkv_bias
        parameters += [LayerParameter(f"{name}.attention.{part}_norm.weight", each) for part in "qk" * qk_norm]
        parameters += [
            _matrix(f"{name}.attention.o.weight", queries, width, tokens),
            LayerParameter(f"{name}.post_norm.weight", width),
            _matrix(f"{name}.mlp.gate.weight", width, mlp, tokens),
            _matrix(f"{name}.mlp.up.weight", width, mlp, tokens),
            _matrix(f"{name}.mlp.down.weight", mlp, width, tokens),
        ]
    parameters.append(LayerParameter("norm.weight", width))
    if not tied:
        parameters.append(_matrix("lm_head.weight", width, words, tokens))
    # Both normalisations with their inputs, queries, keys and values before attention, its result, and four tensors of the gated MLP.
    kept = tokens * (4 * width + 2 * queries + 2 * keys + 4 * mlp)
    block = Block(Activations(kept, fixed_bytes=4 * heads * tokens), Activations(tokens * width))
    return NetworkArithmetic(
        parameters=tuple(parameters),
        blocks=(block,) * layers,
        # The last normalisation with its input, the logarithms of the probabilities, and tokens with their successors.
        others=Activations(tokens * 2 * width, tokens * words, fixed_bytes=2 * 8 * tokens),
        backward_elements=2 * tokens * words,
        tail_products=tokens * width * words if tied else 0,
        tail_elements=width * words if tied else 0,
    )


def t5(
    layers: int, width: int, heads: int, head_width: int, mlp: int, tokens: int, words: int = 32128
) -> NetworkArithmetic:
    """Build a T5 version 1.0 (Raffel et al. 2019, arXiv:1910.10683): encoder and decoder of equal depth and length.

    Args:
        layers: Layers of the encoder, and of the decoder.
        width: Features (`d_model`).
        heads: Attention heads.
        head_width: Features of a head (`d_kv`).
        mlp: Width of the MLP (`d_ff`).
        tokens: Tokens of the input, and of the output.
        words: Size of the vocabulary.
    """
    inner = heads * head_width
    parameters = [LayerParameter("shared.weight", words * width)]
    blocks = []
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        parameters.append(LayerParameter(f"{stack}.relative_bias.weight", 32 * heads))
        for layer in range(layers):
            name = f"{stack}.{layer}"
            for kind in attentions:
                parameters.append(LayerParameter(f"{name}.{kind}_norm.weight", width))
                for part in "qkvo":
                    scores = 2 * tokens * tokens * inner if part == "q" else 0
                    parameters.append(
                        LayerParameter(
                            f"{name}.{kind}.{part}.weight", width * inner, width * inner * tokens + scores, scores
                        )
                    )
            parameters += [
                LayerParameter(f"{name}.mlp_norm.weight", width),
                _matrix(f"{name}.mlp.in.weight", width, mlp, tokens),
                _matrix(f"{name}.mlp.out.weight", mlp, width, tokens),
            ]
        parameters.append(LayerParameter(f"{stack}.norm.weight", width))
        # Per attention: a normalisation with its input, queries, keys, values and the result; scores stay in memory, as their bias
        # rules out torch's fused attention. Then a normalisation with its input, and the MLP before and after its activation function.
        kept = tokens * (len(attentions) * (2 * width + 4 * inner + 2 * heads * tokens) + 2 * width + 2 * mlp)
        blocks += [Block(Activations(kept), Activations(tokens * width))] * layers
    return NetworkArithmetic(
        parameters=tuple(parameters),
        blocks=tuple(blocks),
        others=Activations(tokens * 4 * width, tokens * words, fixed_bytes=3 * 8 * tokens),
        backward_elements=2 * tokens * words,
        tail_products=tokens * width * words,
        tail_elements=width * words,
    )


def _matrix(name: str, inputs: int, outputs: int, tokens: int) -> LayerParameter:
    return LayerParameter(name, inputs * outputs, inputs * outputs * tokens)
