"""Memory of catalogued networks: hand-computed bytes, monotonicity, and changes that fit."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from distrib.bandwidth_model.architectures import Activations, Block, NetworkArithmetic, gpt2, resnet
from distrib.bandwidth_model.memory_estimate import MemoryChange, changes_that_fit, network_memory, peak_bytes
from distrib.bandwidth_model.workload_catalog import catalog_memory, catalog_workload

ADAM = {"moments": 2, "step_copies": 1}


def test_adam_in_32_bits_takes_16_bytes_per_parameter_and_4_for_buckets():
    network = gpt2(12, 768, 12)
    assert network.elements == 124_439_808
    found = network_memory(network, batch=8, half=False, ranks=2, **ADAM)
    assert found.parameter_bytes == found.gradient_bytes == found.bucket_bytes == 4 * 124_439_808
    assert found.optimizer_bytes == 8 * 124_439_808


def test_a_transformer_layer_keeps_38_bytes_per_feature_with_autocast_and_66_without():
    """Korthikanti et al. 2022 count 34 with 16-bit normalisations; the fused attention keeps no scores."""
    (block,) = gpt2(1, 64, 4, tokens=32).blocks
    sums = 4 * 4 * 32 + 16 * 32
    assert block.kept.size(2) == 32 * 64 * 38 + sums
    assert block.kept.size(4) == 32 * 64 * 66 + sums
    assert block.input.size(2) == 32 * 64 * 4


def test_a_network_computed_by_hand():
    block = Block(Activations(10, 2, 3), Activations(1))
    network = NetworkArithmetic(parameters=(), blocks=(block,) * 3, others=Activations(5))
    assert network.activation_bytes(2) == 3 * (20 + 8 + 3) + 10
    assert network.activation_bytes(2, checkpointing="full") == 3 * 2 + (31 - 2) + 10
    assert peak_bytes(kept=100, gradients=20, activations=30, backward=5, step=10) == 135
    assert peak_bytes(kept=100, gradients=40, activations=30, backward=5, step=10) == 150


def test_resnet_50_keeps_86_mb_per_image_in_32_bits():
    """Counted on torch's tensors: 5,498,677,252 bytes for 64 images (tests/training/test_memory.py compares small networks)."""
    found = network_memory(resnet((3, 4, 6, 3)), batch=64, half=False, ranks=1, moments=1, step_copies=0)
    assert abs(found.activation_bytes / 5_498_677_252 - 1) < 1e-3


@given(st.integers(1, 64), st.integers(1, 6), st.booleans(), st.booleans())
def test_memory_grows_with_batch_and_layers_and_shrinks_by_each_change(batch, layers, half, checkpointing):
    def peak(batch: int, layers: int, half: bool, checkpointing: bool) -> int:
        network = gpt2(layers, 64, 4, tokens=128, words=100)
        return network_memory(
            network, batch=batch, half=half, ranks=2, checkpointing="full" if checkpointing else "none", **ADAM
        ).activation_bytes

    now = peak(batch, layers, half, checkpointing)
    assert peak(batch + 1, layers, half, checkpointing) > now
    assert peak(batch, layers + 1, half, checkpointing) > now
    assert peak(batch, layers, half, True) <= peak(batch, layers, half, False)


@given(st.integers(1, 1000), st.integers(1, 10**6), st.booleans(), st.booleans())
def test_changes_fit_and_keep_the_samples_of_a_step(batch, device_bytes, can_halve, can_checkpoint):
    def peak(change: MemoryChange) -> int:
        return 1000 + 1000 * change.batch // ((1 + change.half) * (1 + change.checkpointing))

    for change in changes_that_fit(peak, device_bytes, batch=batch, can_halve=can_halve, can_checkpoint=can_checkpoint):
        assert change.peak_bytes == peak(change) <= 0.95 * device_bytes
        assert change.batch * change.accumulate >= batch and change.text
        assert can_halve >= change.half and can_checkpoint >= change.checkpointing


def test_each_change_is_tried_alone_first_and_then_all_together():
    def peak(change: MemoryChange) -> int:
        return 100 + 800 * change.batch // (1 + change.half) // (1 + 3 * change.checkpointing)

    found = changes_that_fit(peak, 700, batch=1, can_halve=True, can_checkpoint=True)
    assert [change.text for change in found] == ["16-bit autocast", "activation checkpointing"]
    (both,) = changes_that_fit(peak, 220, batch=1, can_halve=True, can_checkpoint=True)
    assert both.half and both.checkpointing and both.peak_bytes == 200
    assert changes_that_fit(peak, 100, batch=1, can_halve=True, can_checkpoint=True) == ()


def test_a_catalogued_network_on_a_gpu_names_changes_or_sharding():
    large = catalog_memory(catalog_workload("VGG-16", "K80", 256), ranks=2, device_bytes=12 * 10**9)
    assert large.fits is False and "batches of 128 with --accumulate 2" in large.advice
    assert "does not fit" in str(large) and "activations" in str(large) and "usable" not in str(large)
    almost = msgspec.structs.replace(large, device_bytes=int(1.02 * large.peak_bytes))
    assert almost.fits is False and "does not fit, as 95% are usable" in almost.verdict
    assert sum(large.parts.values()) >= large.peak_bytes
    huge = catalog_memory(catalog_workload("GPT-2-XL", "V100"), ranks=2, device_bytes=16 * 10**9)
    assert huge.changes == () and "shard" in huge.advice
    small = catalog_memory(catalog_workload("ResNet-50", "A100"), ranks=1, device_bytes=80 * 10**9)
    assert small.fits and small.advice == "" and small.bucket_bytes == 0
    unknown = catalog_memory(catalog_workload("ResNet-50", "A100"), ranks=1, device_bytes=None)
    assert unknown.fits is None and "fit" not in str(unknown)
