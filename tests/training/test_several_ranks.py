"""Training on several ranks under mpirun."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.usefixtures("inductor_cache"), pytest.mark.processes]


def test_four_ranks_train_to_the_parameters_of_one_process(tmp_path):
    """After 20 steps, 4 ranks have the parameters of one process that trains with plain torch on the same batches."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    from tests.scripts.truth import make_data, make_model

    result = run_ranks(4, SCRIPTS / "truth.py", tmp_path, 8, 32 * 20)
    assert result.returncode == 0, result.stderr
    data = make_data(32 * 20)
    shuffled = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    for order, sampler in ("in order", SequentialSampler(data)), ("shuffled", shuffled):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in BatchSampler(sampler, 32, False):
            inputs, targets = data[batch]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        four = torch.load(tmp_path / f"{order}.pt", weights_only=True)
        assert four["values"] == {"steps": 20}
        for name, value in model.state_dict().items():
            torch.testing.assert_close(four["states"]["model"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lessons", "variables"),
    [("uneven,collectives,checkpoints", {}), ("collectives,checkpoints", {"LESSON_WITHOUT_WITH": "1"})],
    ids=["with", "without"],
)
def test_collectives_uneven_data_and_checkpoints_agree_on_three_ranks(lessons, variables, tmp_path):
    result = run_ranks(3, SCRIPTS / "lessons.py", lessons, tmp_path, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [f"{lesson}: learnt" for lesson in lessons.split(",")]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python's own fork is safe since 3.12")
def test_threads_are_paused_while_a_rank_forks():
    """A forked process, such as a loader worker, may otherwise wait forever for a lock (CPython issue 112275)."""
    result = run_ranks(2, SCRIPTS / "lessons.py", "forks")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_rank_that_reads_the_training_loader_alone_still_trains_on_its_share(mode, tmp_path):
    script = tmp_path / "curious.py"
    script.write_text(
        "import distrib, torch\n"
        "from torch.utils.data import DataLoader\n"
        "with distrib.init() as job:\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    loader = DataLoader(torch.arange(64.0).view(64, 1), 8, shuffle=True)\n"
        "    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), loader)\n"
        "    if job.is_main:\n"
        "        first = next(iter(loader))\n"
        "    for epoch in range(3):\n"
        "        read = torch.zeros(64)\n"
        "        for batch in loader:\n"
        "            read[batch.long().view(-1)] += 1\n"
        "            optimizer.zero_grad()\n"
        "            model(batch).sum().backward()\n"
        "            optimizer.step()\n"
        "        print('once', int((job.all_reduce(read, 'sum') == 1).sum()))\n"
        "        if job.is_main:\n"
        "            with torch.no_grad():\n"
        "                sum(model(batch).sum() for batch in loader)\n"
    )
    result = run_ranks(2, script, DISTRIB_STRATEGY=json.dumps({"mode": mode}))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("once 64\n") == 6


@pytest.mark.parametrize(
    ("lessons", "strategy"),
    [
        ("batches_of_arrays,tokens,unusual_types", {"mode": "sync"}),
        (
            "noise_between_rounds,unusual_types",
            {"mode": "local", "inner_steps": 4, "outer": {"lr": 1.0, "momentum": 0.0}},
        ),
    ],
    ids=["sync", "local"],
)
def test_weights_of_batches_types_and_changed_parameters(lessons, strategy):
    result = run_ranks(2, SCRIPTS / "weights.py", lessons, DISTRIB_STRATEGY=json.dumps(strategy))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == lessons.split(",")


def test_progress_is_shown_by_the_main_rank_only(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(
        "import sys, types, distrib\nfrom distrib.training import progress\n"
        "class Bar:\n"
        "    def __init__(self, items, desc, total):\n        self.items, self.text = items, f'{desc} {total}'\n"
        "    def __enter__(self):\n        return self.items\n"
        "    def __exit__(self, *_):\n        print(self.text, 'closed', file=sys.stderr)\n"
        "progress.LINE_INTERVAL_SECONDS = 60.0\n"
        "job = distrib.init()\n"
        "for progress.tqdm in (Bar, None):\n"
        "    seen = [item for item in job.progress(range(job.rank, job.rank + 3), text='epoch 1')]\n"
        "    print(f'rank {job.rank}: {seen}')\n"
    )
    result = run_ranks(2, script)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["rank 0: [0, 1, 2]"] * 2 + ["rank 1: [1, 2, 3]"] * 2
    with_tqdm, without = [line for line in result.stderr.splitlines() if "epoch 1" in line]
    assert with_tqdm.startswith("epoch 1 None closed") and without.startswith("epoch 1: 3 of 3, "), result.stderr
