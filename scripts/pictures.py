"""Draw the pictures of README.md from real runs: `python scripts/pictures.py`.

`docs/pictures/failure.svg` is the terminal's content after a job whose rank 1 fails. `docs/pictures/scaling.svg` is the plot of
`distrib-topo plan`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
COMMANDS = Path(sys.executable).parent
SCRIPT = """\
import distrib
import torch

job = distrib.init()
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 10)), batch_size=4)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for step, (batch,) in enumerate(loader):
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if job.rank == 1 and step == 5:
        raise ValueError(f"bad sample in step {step}")
"""


def draw_failure(target: Path) -> None:
    """Run a job that fails, and write its output as a terminal window.

    Args:
        target: SVG file.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        command = ["distrib-launch", "-np", "2", "--run-dir", "run", "train.py"]
        done = subprocess.run(
            [COMMANDS / command[0], *command[1:]],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    output = re.sub(r"/[^\"]*/site-packages/", "", done.stdout.replace(f"{folder}/", ""))
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {' '.join(command)}\n{output.rstrip()}"))
    picture = console.export_svg(title="distrib-launch", unique_id="failure")
    target.write_text(re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL))  # no fonts from other servers


def draw_scaling(target: Path) -> None:
    """Plot the predicted scaling of ResNet-50 over 100 GbE.

    Args:
        target: SVG file.
    """
    words = [
        "--workload",
        "ResNet-50",
        "--gpu",
        "A100",
        "--network",
        "100GbE",
        "--nodes",
        "1..64",
        "--plot",
        str(target),
    ]
    subprocess.run([COMMANDS / "distrib-topo", "plan", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw_failure(PICTURES / "failure.svg")
    draw_scaling(PICTURES / "scaling.svg")
