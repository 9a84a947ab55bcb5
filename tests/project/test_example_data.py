"""Shared code of train_gpt2 and train_resnet50: readers of their data, MFU, learning rate, and checkpoints of one process."""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import ROOT

SIZE = 16


def load(name: str) -> Any:
    """Import a helper module of the examples."""
    folder = str(ROOT / "examples")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


gpt2, images, prepare_tokens, recipe, resnet = map(load, ("gpt2", "images", "prepare_tokens", "recipe", "resnet"))


def encoded(label: int) -> bytes:
    """Return a PNG image, all of whose bytes are `label`."""
    file = io.BytesIO()
    Image.new("RGB", (24, 20), (label, label, label)).save(file, "PNG")
    return file.getvalue()


def write_shard(path: Path, labels: list[int]) -> Path:
    """Write a shard as WebDataset does: the files of a sample follow each other, and have a common name up to the dot."""
    with tarfile.open(path, "w") as shard:
        for number, label in enumerate(labels):
            for suffix, content in (("json", b"{}"), ("cls", str(label).encode()), ("png", encoded(label))):
                member = tarfile.TarInfo(f"folder.d/{number:04}.{suffix}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return path


def test_tokens_that_were_written_are_read(tmp_path):
    text = "naïve texts, " * 10
    written = prepare_tokens.write(tmp_path / "t.bin", [text, "end"])
    expected = list(f"{text}\n\nend".encode())
    assert written == len(expected)
    assert json.loads((tmp_path / "t.json").read_text()) == {"vocabulary": 256, "tokens": written}
    blocks = gpt2.TokenFile(tmp_path / "t.bin", context=7)
    assert len(blocks) == (written - 1) // 7
    for index in range(len(blocks)):
        tokens, targets = blocks[index]
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == expected[7 * index : 7 * index + 7]
        assert targets.tolist() == expected[7 * index + 1 : 7 * index + 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.json"]


def test_python_itself_has_texts_for_the_tokens():
    assert sum(map(len, prepare_tokens.topics())) > 200_000


def test_a_shard_has_the_samples_that_were_written(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [3, 1, 2])
    assert list(images.read_shard(shard)) == [(encoded(label), label) for label in (3, 1, 2)]


def test_ranks_read_all_shards_once(tmp_path):
    shards = [write_shard(tmp_path / f"{n}.tar", [10 * n, 10 * n + 1]) for n in range(3)]
    read = [list(images.Shards(shards, SIZE, rank, 2, training=False)) for rank in (0, 1)]
    assert [label for _, label in itertools.chain(*read)] == [0, 1, 20, 21, 10, 11]
    assert all(image.shape == (3, SIZE, SIZE) and (image == label).all() for image, label in itertools.chain(*read))
    with pytest.raises(SystemExit, match=r"3 tar files.* 4 ranks"):
        images.Shards(shards, SIZE, 0, 4, training=False)


def test_training_reads_shards_again_and_again_in_another_order(tmp_path):
    shards = [write_shard(tmp_path / f"{n}.tar", [10 * n + i for i in range(8)]) for n in range(2)]
    stream = DataLoader(images.Shards(shards, SIZE, 0, 1, training=True), batch_size=8)
    epochs = images.Epochs(stream, batches=2)
    passes = [torch.cat([labels for _, labels in epochs]).tolist() for _ in range(2)]
    assert len(epochs) == 2
    assert passes[0] != passes[1]
    assert all(sorted(one) == [*range(8), *range(10, 18)] for one in passes)


def test_a_folder_has_a_class_for_each_subfolder(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(encoded(label))
        (tmp_path / name / "notes.txt").touch()
    samples = list(itertools.islice(images.Folder(tmp_path, SIZE, training=True), 2))
    assert [label for _, label in samples] == [0, 1]
    assert all(image.dtype == torch.uint8 and (image == label).all() for image, label in samples)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_crops_lie_within_the_image(width, height):
    for left, top, right, bottom in (images.random_box(width, height), images.center_box(width, height)):
        assert 0 <= left < right <= width + 1e-9
        assert 0 <= top < bottom <= height + 1e-9


def test_mfu_is_that_computed_by_hand():
    # Per layer 12 x 768^2 + 13 x 768 = 7,087,872 parameters, in all 50304 x 768 + 12 x 7,087,872 + 2 x 768 = 123,689,472.
    # 6 FLOPs for each, and 12 x 12 x 768 x 1024 for attention.
    flops = gpt2.flops_per_token(gpt2.Shape())
    assert flops == 6 * 123_689_472 + 113_246_208 == 855_383_040
    peak = recipe.catalog_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert peak == pytest.approx(989e12, rel=1e-3)
    meter = recipe.Meter("tokens", flops, peak, ranks=8)
    meter.add(4_650_000)  # of this rank, in 10 s
    meter.begin -= 10
    lap = meter.lap()
    assert lap["tokens_per_second"] == pytest.approx(8 * 465_000, rel=0.01)
    assert lap["mfu"] == pytest.approx(0.402, abs=0.005)
    assert meter.items == 0
    assert recipe.line({"step": 20, "loss": 3.14159, "lr": 6e-4, "tokens_per_second": 465000.4, "mfu": 0.4021}) == (
        "step 20: loss 3.1416, lr 6.0e-04, 465,000 tokens/s, MFU 40.2%"
    )


def test_without_a_known_peak_there_is_no_mfu():
    assert recipe.peak_flops(torch.device("cpu"), "bf16") is None
    assert recipe.catalog_flops("Unheard-of GPU", "bf16") is None
    assert recipe.catalog_flops("Tesla T4", "bf16") is None
    assert recipe.catalog_flops("Tesla T4", "fp16") == 65e12
    assert recipe.catalog_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12  # TF32
    assert list(recipe.Meter("images", 1e9, None).lap()) == ["images_per_second"]


def test_parameters_and_flops_of_the_models():
    assert sum(parameter.numel() for parameter in resnet.ResNet().parameters()) == 25_557_032
    small = gpt2.Shape(layers=2, heads=2, width=8, context=16, vocabulary=10)
    parameters = gpt2.Gpt2(small).named_parameters()
    counted = sum(parameter.numel() for name, parameter in parameters if "position" not in name)
    assert gpt2.flops_per_token(small) == 6 * counted + 12 * 2 * 8 * 16
    # 4,089,184,256 multiply-adds of a forward pass, two FLOPs each, and twice as many for the backward pass.
    usual = argparse.Namespace(classes=1000, blocks=(3, 4, 6, 3), width=64, size=224)
    assert resnet.flops_per_image(usual) == 3 * 2 * 4_089_184_256


def test_the_rate_rises_linearly_and_falls_to_its_end():
    rates = [recipe.rate_factor(step, 4, 12, 0.1) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)
    assert rates[12:] == pytest.approx([0.1, 0.1])


def test_a_single_process_continues_from_its_checkpoint(tmp_path):
    def make() -> tuple[nn.Module, DataLoader[Any]]:
        samples = TensorDataset(torch.arange(6))
        return nn.Linear(2, 2), DataLoader(samples, 6, sampler=recipe.Shuffle(6, seed=1))

    path = tmp_path / "a.pt"
    (model, loader), (other, order) = make(), make()
    assert recipe.restore(path, model=model, loader=loader, step=0) == {"step": 0}
    first, second = (next(iter(loader))[0].tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == [*range(6)]
    recipe.save(path, model=model, loader=loader, step=7)
    assert recipe.restore(path, model=other, loader=order, step=0) == {"step": 7}
    assert torch.equal(other.weight, model.weight)
    assert next(iter(order))[0].tolist() == next(iter(loader))[0].tolist() != first
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
