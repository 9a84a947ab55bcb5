"""Scripts of which several copies would train by themselves are told from those that may meet."""

from __future__ import annotations

import pytest

from distrib_launch.alone import trains_alone
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"

TRAINS = "import torch\nfrom torch import nn\nloss = nn.Linear(1, 1)(torch.ones(1)).sum()\nloss.backward()\n"


@pytest.mark.parametrize(
    ("before", "alone"),
    [
        ("import numpy as np, os, argparse\nfrom tqdm import tqdm\nfrom torch.utils.data import DataLoader", True),
        ("import nets", True),
        ("import words", True),
        ("from data.read import load", True),
        ("import distrib", False),
        ("import torch.distributed as dist", False),
        ("from torch import distributed", False),
        ("from torch.nn.parallel import DistributedDataParallel\ntorch.distributed.init_process_group()", False),
        ("from mpi4py import MPI", False),
        ("import horovod.torch as hvd", False),
        ("import accelerate", False),
        ("from unknown_package import train", False),
        ("import meeting", False),
        ("from data import meets", False),
        ("import torch.multiprocessing as mp", False),
        ("import subprocess", False),
        ("import os\nseed = os.environ['RANK']", False),
        ("world_size = 1", False),
        ("frankly = 1", True),
        ("this is no Python", False),
    ],
)
def test_what_a_script_imports_says_whether_copies_can_meet(before, alone, tmp_path):
    (tmp_path / "nets.py").write_text("import os\nverbose = os.environ.get('RANK', '0') == '0'\n")
    (tmp_path / "meeting.py").write_text("from torch.distributed import all_reduce\n")
    (tmp_path / "words.py").write_text("import math\n")
    (tmp_path / "words").mkdir()  # of which Python takes the file
    (tmp_path / "data").mkdir()
    (tmp_path / "data/read.py").write_text("from . import words\n" + "import math\n")
    (tmp_path / "train.py").write_text(before + "\n" + TRAINS)
    if "meets" in before:
        (tmp_path / "data/meets.py").write_text("import mpi4py\n")
    assert trains_alone(tmp_path / "train.py") == alone


def test_only_what_trains_is_meant(tmp_path):
    (tmp_path / "evaluate.py").write_text("import torch\nprint(torch.ones(1))\n")
    assert not trains_alone(tmp_path / "evaluate.py") and not trains_alone(tmp_path / "none.py")


def test_the_launcher_says_so(launch):
    run = launch("-np", "2", "--dry-run", EXAMPLES / "train_cnn_single.py")
    assert run.code == 0 and "2 copies of it train, each by itself; job = distrib.init()" in run.out + run.err, run
    for arguments in (("-np", "1", EXAMPLES / "train_cnn_single.py"), ("-np", "2", EXAMPLES / "train_cnn.py")):
        run = launch("--dry-run", *arguments)
        assert run.code == 0 and "by itself" not in run.out + run.err, run
