"""Write a file of tokens for train_gpt2.py: one token for each byte of text files, or of Python's own documentation."""

from __future__ import annotations

import argparse
import ast
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy

VOCABULARY = 256


def topics() -> Iterator[str]:
    """Yield the texts of Python's `help()`."""
    from pydoc_data.topics import topics as texts  # half a megabyte that only this function needs

    yield from (texts[name] for name in sorted(texts))


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the modules, classes and functions of Python's standard library."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield text


def write(path: Path, texts: Iterable[str]) -> int:
    """Write texts as tokens of uint16, and the size of the vocabulary as JSON beside them. Return the number of tokens.

    Both files appear complete: several ranks may write the same ones at the same time.
    """
    tokens = numpy.frombuffer("\n\n".join(texts).encode(), dtype=numpy.uint8).astype(numpy.uint16)
    about = json.dumps({"vocabulary": VOCABULARY, "tokens": len(tokens)})
    for target, content in ((path.with_suffix(".json"), about.encode()), (path, tokens.tobytes())):
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(target)
    return len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT", help="text files; none for Python's own texts")
    parser.add_argument("-o", "--output", type=Path, default=Path("tokens.bin"))
    args = parser.parse_args()
    texts = [file.read_text(encoding="utf-8") for file in args.texts] or [*topics(), *docstrings()]
    print(f"{args.output}: {write(args.output, texts):,} tokens")


if __name__ == "__main__":
    main()
