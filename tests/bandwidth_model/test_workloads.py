"""Workloads for planning: arithmetic and figures of the catalogue, and profiles in files."""

from __future__ import annotations

import json
import math
import statistics

import msgspec
import pytest

from distrib.bandwidth_model import network_catalog
from distrib.bandwidth_model.network_catalog import network_arithmetic
from distrib.bandwidth_model.step_timeline import slowest_of
from distrib.bandwidth_model.workload import Workload, read_workload, validate_workload
from distrib.bandwidth_model.workload_catalog import (
    WorkloadOptions,
    catalog_workload,
    on_cpus,
    scaled_workload,
)
from distrib.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        # Published by torchvision's model pages and by Hugging Face under these names.
        ("ResNet-50", 25_557_032, 161),
        ("ResNet-101", 44_549_160, 314),
        ("ResNeXt-101", 44_177_704, 314),
        ("ResNeXt-101-32x8d", 88_791_336, 314),
        ("EfficientNet-B0", 5_288_548, 213),
        ("EfficientNet-B4", 19_341_616, 418),
        ("VGG-16", 138_357_544, 32),
        ("ViT-B", 86_567_656, 152),
        ("GPT-2", 124_439_808, 148),
        ("GPT-2-medium", 354_823_168, 292),
        ("GPT-2-large", 774_030_080, 436),
        ("GPT-2-XL", 1_557_611_200, 580),
        ("BERT-large", 336_226_108, 302),
    ],
)
def test_networks_have_the_parameters_that_were_published(name, parameters, tensors):
    assert network_arithmetic(name).elements == parameters
    found = catalog_workload(name, "A100")
    assert sum(gradient.elements for gradient in found.gradients) == parameters
    assert (len(found.gradients), found.gradient_bytes, found.parameter_bytes) == (
        tensors,
        4 * parameters,
        4 * parameters,
    )


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("ResNet-50", 4.09e9),
        ("ResNeXt-101-32x8d", 16.41e9),
        ("EfficientNet-B0", 0.386e9),
        ("EfficientNet-B4", 4.39e9),
        ("VGG-16", 15.47e9),
        ("ViT-B", 17.56e9),
    ],
)
def test_forward_passes_do_the_work_that_was_published(name, products):
    assert network_arithmetic(name).forward_products == pytest.approx(
        products, rel=0.002
    )  # torchvision counts multiplications as GFLOPS


def test_gradients_are_ready_from_the_last_layer_to_the_first():
    found = catalog_workload("resnet50", "V100", 128)
    ready = [gradient.ready_seconds for gradient in found.gradients]
    assert ready == sorted(ready)
    assert (found.gradients[0].name, found.gradients[-1].name) == ("fc.bias", "conv1.weight")
    assert ready[-1] == pytest.approx(found.backward_seconds)
    late = [g for g in catalog_workload("GPT-2", "A100").gradients if g.name == "wte.weight"]
    assert late[0].ready_seconds == pytest.approx(
        catalog_workload("GPT-2", "A100").backward_seconds
    )  # the tied embedding is last


def test_no_published_speed_is_more_than_the_gpu_can_do():
    """No network comes near the peak. A higher result indicates smaller samples or shorter sequences."""
    for speed in network_catalog.published_speeds():
        operations = 3 * 2 * network_arithmetic(speed.network).forward_products * speed.samples_per_second
        if speed.network == "VGG-16":  # Winograd's 3 x 3 convolutions need 2.25 times fewer multiplications
            operations /= 2.25
        assert operations < 0.85 * network_catalog.peak_flop_per_second(speed.gpu, speed.precision), speed


def test_a_published_speed_is_what_comes_out():
    for speed in network_catalog.published_speeds():
        if speed.gpu == "RTX-3090":  # not in the catalogue
            continue
        options = WorkloadOptions(checkpointing=speed.checkpointing)
        found = catalog_workload(
            speed.network, speed.gpu, speed.batch or None, precision=speed.precision, options=options
        )
        passes_seconds = found.forward_seconds + found.backward_seconds
        passes_seconds *= slowest_of(speed.ranks, found.variation)
        assert found.batch / passes_seconds == pytest.approx(speed.samples_per_second)
        assert found.expected_error == 0.1


def test_errors_to_expect_are_those_of_leaving_each_published_speed_out():
    errors: dict[float, list[float]] = {}
    for speed in network_catalog.published_speeds():
        pace = network_catalog.estimate_compute_rate(speed.network, speed.gpu, speed.precision, excluded=speed)
        real = speed.samples_per_second * network_arithmetic(speed.network).training_flop
        errors.setdefault(pace.expected_error, []).append(abs(pace.flop_per_second / real - 1))
    assert set(errors) == {0.2, 0.5}
    for stated, seen in errors.items():
        assert statistics.mean(seen) <= stated * 1.1, (stated, seen)


def test_every_network_on_every_gpu():
    from distrib.cluster.hardware_catalog import hardware_catalog

    for gpu in hardware_catalog().gpus:
        for name in network_catalog.network_names():
            found = validate_workload(catalog_workload(name, gpu.name), name)
            assert found.device == gpu.name and found.compute_seconds > 0 and found.memory_bytes
            assert found.software["speed"].startswith(("published: ", "scaled from "))


def test_memory_of_a_step():
    # Published measurements: ResNet-50 in fp32 takes about 100 MB per image, BERT-large 16 bytes per
    # parameter and more before the first sample.
    small, large = (
        catalog_workload("ResNet-50", "V100", 64, precision="fp32"),
        catalog_workload("ResNet-50", "V100", 128, precision="fp32"),
    )
    assert (large.memory_bytes - small.memory_bytes) / 64 == pytest.approx(90e6, rel=0.1)
    assert catalog_workload("GPT-2-XL", "A100", 1).memory_bytes > 16 * 1_557_611_200


def test_mistakes_are_told():
    with pytest.raises(ConfigError, match="did you mean ResNet-50"):
        catalog_workload("resnet5", "V100")
    with pytest.raises(ConfigError, match="it has ResNet-50, "):
        catalog_workload("zzz", "V100")
    with pytest.raises(ConfigError, match="not in the catalogue"):
        catalog_workload("ResNet-50", "V1000000")
    with pytest.raises(ConfigError, match="batch of 0 samples"):
        catalog_workload("ResNet-50", "V100", 0)


def profile(**changes: object) -> Workload:
    return msgspec.structs.replace(catalog_workload("ResNet-50", "V100"), origin="measured", **changes)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile()))
    assert read_workload(path) == profile()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("gradients", [], r"\$\.gradients: no gradients"),
        ("forward_seconds", -1.0, r"\$\.forward_seconds: -1\.0, expected"),
        ("batch", 0, r"\$\.batch: 0 samples"),
        ("backward_seconds", "fast", r"`\$\.backward_seconds`"),
        ("parameter_bytes", 0, r"\$\.parameter_bytes"),
        ("memory_bytes", 5, r"\$\.memory_bytes: 5 bytes contradict \$\.parameter_bytes"),
        ("parameter_bytes", 5, r"\$\.parameter_bytes: 5 bytes contradict \$\.gradients"),
        ("forward_seconds", math.nan, r"\$\.forward_seconds: nan, expected"),
        ("backward_seconds", 1.7e308, r"\$\.backward_seconds: 1\.7e\+308, expected 1e\+06 at most"),
        ("variation", math.inf, r"\$\.variation: inf, expected"),
        ("processor_share", 5, r"\$\.processor_share: 5, expected 1 at most"),
        ("memory_bytes", -5, r"\$\.memory_bytes: -5, expected"),
        ("expected_error", 9, r"\$\.expected_error"),
        ("device", "CPU", r"\$\.device: 'CPU' is unknown; write 'cpu'"),
        ("device", "", r"\$\.device: '', expected"),
        ("name", "x\x1b[31m", r"\$\.name: 'x\\x1b\[31m', expected"),
        ("processors", 10**400, r"`\$\.processors`"),
        ("bacth", 3, r"unknown field `bacth`; did you mean batch\?"),
    ],
)
def test_a_broken_profile_is_refused_with_the_path(tmp_path, path, value, says):
    told = json.loads(msgspec.json.encode(profile()))
    told[path] = value
    (tmp_path / "p.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"p\.json: .*" + says):
        read_workload(tmp_path / "p.json")


def test_an_integer_beyond_all_floats_of_a_measured_profile_is_refused():
    with pytest.raises(ConfigError, match=r"\$\.sample_tokens: inf, expected .* at most"):
        validate_workload(profile(sample_tokens=10**400), "profile of rank 0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size_bytes", 0),
        ("size_bytes", 10**18),
        ("ready_seconds", math.inf),
        ("ready_seconds", math.nan),
        ("ready_seconds", 1000.0),
        ("elements", 0),
        ("elements", 10**18),
        ("dtype", "banana"),
        ("name", "\x1b[31m"),
    ],
)
def test_a_broken_gradient_is_refused_with_the_path(tmp_path, field, value):
    told = json.loads(msgspec.json.encode(profile()))
    told["gradients"][3][field] = value
    (tmp_path / "p.json").write_text(json.dumps(told))  # Python's JSON has NaN and Infinity
    with pytest.raises(ConfigError, match=r"p\.json: \$\.gradients\[3\]\."):
        read_workload(tmp_path / "p.json")


def test_more_gradients_than_a_rank_can_hold_are_refused_before_they_are_cut(tmp_path):
    told = json.loads(msgspec.json.encode(profile()))
    told["gradients"][3] |= {"elements": 10**18, "size_bytes": 4 * 10**18}
    (tmp_path / "p.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"\$\.gradients\[3\]\.size_bytes: 4,000,"):
        read_workload(tmp_path / "p.json")


def test_no_file_and_no_json_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        read_workload(tmp_path / "none.json")
    for text, says in [
        (b"\xff{", r"p\.json: is not UTF-8 JSON; write one with distrib-launch --profile"),
        (b"", r"p\.json:1: is not valid JSON: "),
        (b'{\n"name": x}', r"p\.json:2: is not valid JSON: "),
        (b"[" * 100_000, r"p\.json: is nested too deeply"),
        (b"{}", r"p\.json: missing: \$\.name, \$\.origin, .* and 1 more; write one with"),
        (b'{"name": "n", "gradients": [{"name": "w"}]}', r"missing: .*\$\.gradients\[0\]\.elements"),
    ]:
        (tmp_path / "p.json").write_bytes(text)
        with pytest.raises(ConfigError, match=says):
            read_workload(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("share", "times_as_long"),
    [
        (1.0, 4.0),
        (0.25, 1.0),
        (0.1, 1.0),
        (0.625, 2.5),
    ],  # all four always busy; one busy; mostly waiting; half parallel
)
def test_a_rank_with_fewer_processors_than_were_profiled(share, times_as_long):
    before = profile(device="cpu", processors=4, processor_share=share)
    after = on_cpus(before, 1)
    assert after.compute_seconds == pytest.approx(times_as_long * before.compute_seconds)
    assert after.gradients[-1].ready_seconds == pytest.approx(times_as_long * before.gradients[-1].ready_seconds)
    assert (after.processors, after.processor_share) == (1, pytest.approx(min(1.0, 4 * share / times_as_long)))
    assert on_cpus(before, 4) is before and on_cpus(before, 8) is before


def test_another_batch_and_another_gpu():
    before = profile()
    double = scaled_workload(before, batch=2 * before.batch)
    assert double.backward_seconds == pytest.approx(2 * before.backward_seconds)
    assert double.gradients[-1].ready_seconds == pytest.approx(2 * before.gradients[-1].ready_seconds)
    assert double.optimizer_seconds == before.optimizer_seconds and double.gradient_bytes == before.gradient_bytes
    assert before.memory_bytes < double.memory_bytes < 2 * before.memory_bytes
    faster = scaled_workload(before, gpu="H100")
    assert faster.compute_seconds < before.compute_seconds and faster.expected_error == 0.2
    assert scaled_workload(before, gpu="V100") == before
    with pytest.raises(ConfigError, match="measured on cpu"):
        scaled_workload(profile(device="cpu"), gpu="H100")
