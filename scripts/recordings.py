"""Record terminal sessions on a virtual cluster for docs/recordings: `python scripts/recordings.py [NAME ...]`.

Needs root, tmux and tqdm. Each session runs in a terminal of 80x24 and one of 200x50, and is written as the terminal shows it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.virtual_cluster import Cluster  # noqa: E402  after the path

PAGES = ROOT / "docs" / "recordings"
SIZES = ((80, 24), (200, 50))
TIMEOUT_SECONDS = 300
SCRIPT = """\
import os, sys, time
import distrib
import torch

job = distrib.init()
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(2400, 100))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = job.prepare(model, optimizer, loader)
fails = sys.argv[1] if len(sys.argv) > 1 and job.rank == 1 else ""
for epoch in range(3):
    for step, (batch,) in enumerate(job.progress(loader, text=f"epoch {epoch}")):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if epoch == 1 and step == 20:
            if fails == "raise":
                raise ValueError(f"bad sample in step {step}")
            if fails == "kill":
                os.kill(os.getpid(), 9)
            if fails == "hang":
                time.sleep(3600)
    job.print(f"epoch {epoch}: loss {loss:.3f}")
"""


class Recording(NamedTuple):
    """One session.

    Attributes:
        title: Heading of its section.
        command: Typed into the shell of the first host.
        cue: Text after whose appearance `disturb` is called.
        disturb: Change of the cluster, given the terminal.
        once: Record it in the narrow terminal only.
    """

    title: str
    command: str
    cue: str = ""
    disturb: Callable[[Terminal, Cluster], object] = lambda *_: None
    once: bool = False


class Terminal:
    """Shell on the first host of a cluster, in a tmux session of its own."""

    def __init__(self, cluster: Cluster, folder: Path, size: tuple[int, int]) -> None:
        self.done = folder / ".done"
        self.done.unlink(missing_ok=True)
        shell = ["env", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS=1", "PS1=$ ",
                 f"PROMPT_COMMAND=echo > {self.done}", "bash", "--noprofile", "--norc"]  # fmt: skip
        width, height = map(str, size)
        self.tmux("new-session", "-d", "-x", width, "-y", height, shlex.join(cluster.enter("n1", shell, cwd=folder)))
        self.wait(self.done.exists)

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", f"distrib-{os.getpid()}", "-f", "/dev/null", *words]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self.text())
            time.sleep(0.05)

    def send(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def text(self) -> str:
        return self.tmux("capture-pane", "-p", "-S", "-").rstrip()

    def close(self) -> None:
        self.tmux("kill-server")


RECORDINGS = (
    Recording("Options", "distrib-launch --help", once=True),
    Recording("Successful run", "distrib-launch -H cluster.txt train.py"),
    Recording("Rank that raises", "distrib-launch -H cluster.txt train.py raise"),
    Recording("Killed rank", "distrib-launch -H cluster.txt train.py kill"),
    Recording("Hang", "distrib-launch -H cluster.txt --hang-timeout 5s train.py hang"),
    Recording("Ctrl-C", "distrib-launch -H cluster.txt train.py", "epoch 0", lambda terminal, _: terminal.send("C-c")),
    Recording("Lost host", "distrib-launch -H cluster.txt train.py", "epoch 0", lambda _, hosts: hosts.lose("n3")),
    Recording("Healthy hosts", "distrib-topo check -H cluster.txt train.py"),
    Recording("Host without a name", "distrib-topo check -H n1,n2,n4 train.py"),
    Recording("Measured links", "distrib-topo probe -H cluster.txt --quick -o measured.yaml"),
    Recording("Hosts and links", "distrib-topo show --topology measured.yaml"),
    Recording("Predicted scaling", "distrib-topo plan --workload ResNet-50 --gpu A100 --network 25GbE --nodes 1..16"),
)


def record(recording: Recording, cluster: Cluster, folder: Path, size: tuple[int, int]) -> str:
    """Return the content of the terminal after a session, with what scrolled away.

    Args:
        recording: The session.
        cluster: Its hosts; a lost host is restored.
        folder: Working directory.
        size: Columns and lines.
    """
    terminal = Terminal(cluster, folder, size)
    try:
        terminal.done.unlink()
        terminal.send(recording.command, "Enter")
        if recording.cue:
            terminal.wait(lambda: recording.cue in terminal.text())
            recording.disturb(terminal, cluster)
        terminal.wait(terminal.done.exists)
        time.sleep(0.2)  # the prompt follows the file
        return terminal.text().removesuffix("\n$")
    finally:
        terminal.close()
        cluster.restore("n3")


def main() -> None:
    """Write one page per size, or print the recordings whose titles are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("titles", nargs="*", metavar="TITLE", help="print these recordings (default: write all)")
    titles = parser.parse_args().titles
    for size in SIZES:
        columns, lines = size
        page = [
            f"# Recordings at {columns}x{lines}\n",
            "Output of real runs on three virtual hosts; n3 has a slow link.\n",
        ]
        with (
            Cluster(3, rate="400mbit", rates={"n3": "100mbit"}) as cluster,
            tempfile.TemporaryDirectory(prefix="demo-") as directory,
        ):
            folder = Path(directory)
            (folder / "cluster.txt").write_text("n1 slots=1\nn2 slots=1\nn3 slots=1\n")
            (folder / "train.py").write_text(SCRIPT)
            for recording in RECORDINGS:
                if (recording.once and size != SIZES[0]) or (titles and recording.title not in titles):
                    continue
                page.append(f"## {recording.title}\n\n```text\n{record(recording, cluster, folder, size)}\n```\n")
                print(page[-1], flush=True)
                if not titles:
                    PAGES.mkdir(exist_ok=True)
                    (PAGES / f"{columns}x{lines}.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
