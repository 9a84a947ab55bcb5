"""Whether a script was written for one process: several copies of it would each train a model of their own."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

WORDS = "was written for one process, as was all that it imports"
NOTE = (
    f"{{script}} {WORDS}: {{copies}} copies of it train, each by itself; "
    "job = distrib.init() and job.prepare(...) make them train one model (README.md, In a script)"
)

_JOINS_NOBODY = (
    frozenset(sys.stdlib_module_names)
    - {"asyncio", "ctypes", "multiprocessing", "runpy", "socket", "subprocess", "xmlrpc"}
) | {
    *("torch", "torchvision", "torchaudio", "torchtext", "torchmetrics", "torchinfo", "torchsummary", "timm", "einops"),
    *(
        "numpy",
        "scipy",
        "pandas",
        "sklearn",
        "skimage",
        "cv2",
        "PIL",
        "matplotlib",
        "seaborn",
        "mlxtend",
        "h5py",
        "yaml",
    ),
    *("tqdm", "rich", "requests", "safetensors", "tensorboard", "tensorboardX", "tiktoken", "wandb"),
}
"""What scripts import without any wish to meet other processes. Of anything else nothing is known."""
_MEETS = {"distributed", "multiprocessing", "spawn", "rpc", "import_module"}
_KNOWS_RANKS = re.compile(r"(?<![a-z])(rank|world_?size|procid|task_id)", re.IGNORECASE)
_MOST_FILES = 200


def parsed(file: Path) -> ast.Module:
    """What a file of Python says. Raises SyntaxError, ValueError or RecursionError where it is none, and OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which Python gives when it runs
        return ast.parse(file.read_bytes())


def trains_alone(script: Path) -> bool:
    """Whether `script` computes gradients with torch, and neither it nor what it imports beside it can meet other processes.

    False where that is not certain: the files are read and not run, and most packages may do anything.
    """
    trains, waiting, read = False, [script], {script}
    try:
        if _KNOWS_RANKS.search(script.read_text()):  # it does what each rank should do
            return False
        while waiting:
            nodes = [*ast.walk(parsed(waiting.pop()))]
            attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            trains |= "backward" in attributes
            names = set(_imported(nodes))
            if _MEETS & attributes or any(_MEETS & {*name.split(".")} for name in names):
                return False
            for top in {name.partition(".")[0] for name in names} - _JOINS_NOBODY:
                if not (files := _beside(script.parent, top)):
                    return False
                waiting += [file for file in files if file not in read]
                read.update(files)
            if len(read) > _MOST_FILES:
                return False
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return trains


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    """The names of modules, and of what is imported from them; what is relative is in a package that is read whole."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _beside(folder: Path, name: str) -> list[Path]:
    """The files of a module or package of the script's own folder, which Python finds first."""
    package = folder / name
    if package.is_dir() and ((package / "__init__.py").is_file() or not (folder / f"{name}.py").is_file()):
        return sorted(itertools.islice(package.rglob("*.py"), _MOST_FILES + 1))
    return [file for file in (folder / f"{name}.py",) if file.is_file()]
