#!/usr/bin/env python3
"""Measure how readable a checkout is: code by the rules of CONTRIBUTING.md, docs by length of sentences and paragraphs.

python scripts/readability.py                # this checkout
python scripts/readability.py dee04b5 HEAD   # commits side by side
python scripts/readability.py --list HEAD    # with every finding
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGES = ("distrib", "launch")
DOCS = ("README.md", "docs")
MAX_FILE_LINES = 500
MAX_CLASS_LINES = 300
QUESTION_WORDS = {"what", "whether", "how", "who", "where", "which", "that", "of", "whose", "whom"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Report = dict[str, "int | list[str]"]


class Module:
    """One parsed Python file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.is_package = path.name == "__init__.py"

    def at(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}"


def load_modules(root: Path) -> list[Module]:
    """Return the product's modules. In the old layout, `launch/` is itself the package distrib_launch."""
    modules = []
    for package in PACKAGES:
        base = root if package != "launch" or not (root / "launch/distrib_launch").is_dir() else root / "launch"
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if parts[0] == "launch":
                parts = ("distrib_launch", *parts[1:])
            modules.append(Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return modules


def count_lines(module: Module) -> Counter[str]:
    """Count lines by kind: a line counts as code, docstring or comment, whichever of these it has first."""
    kinds: dict[str, set[int]] = {"code": set(), "docstring": set(), "comment": set()}
    for node in ast.walk(module.tree):  # also strings that describe a constant
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            kinds["docstring"].update(range(node.lineno, (node.end_lineno or 0) + 1))
    ignored = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in ignored:
            kind = "comment" if token.type == tokenize.COMMENT else "code"
            kinds[kind].update(range(token.start[0], token.end[0] + 1))
    kinds["code"] -= kinds["docstring"]
    kinds["comment"] -= kinds["code"] | kinds["docstring"]
    return Counter({"all": module.text.count("\n"), **{kind: len(lines) for kind, lines in kinds.items()}})


def is_threshold(node: ast.expr) -> bool:
    """Return True for numbers, arithmetic on numbers such as `1 << 20`, and tuples and dicts with numbers."""
    if isinstance(node, (ast.Tuple, ast.Dict)):
        return any(isinstance(one, ast.Constant) and is_number(one) for one in ast.walk(node))
    return is_number(node)


def is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def module_constants(module: Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield names in capitals that a module assigns at its top, with their values."""
    for statement in module.tree.body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not statement.value:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=True))
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name) and name.id.isupper())


def regexes(module: Module) -> Iterator[ast.AST]:
    """Yield the regular expressions that are compiled on import."""
    for statement in module.tree.body:
        for node in ast.walk(statement) if not isinstance(statement, FUNCTIONS) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile":
                yield node


def inner_imports(module: Module) -> Iterator[ast.AST]:
    """Yield the imports inside functions."""
    for function in ast.walk(module.tree):
        if isinstance(function, FUNCTIONS):
            yield from (node for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom)))


def imported_names(module: Module) -> set[str]:
    """Return the dotted names that a module imports, also inside functions and for type checking."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.name.split(".")[: None if module.is_package else -1]
            relative = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            base = ".".join(relative) if node.level else node.module
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def find_cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                cycles.append(sorted(stack[start:]))
            del stack[start:]

    for name in graph:
        if name not in order:
            visit(name)
    return cycles


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Return for each module those of ours that it imports: of `from a import b` the module `a.b` if there is one, else `a`."""
    ours = {module.name for module in modules}
    graph = {}
    for module in modules:
        names = imported_names(module)
        longer = {name.rpartition(".")[0] for name in names if name in ours}
        found = {name if name in ours else name.rpartition(".")[0] for name in names}
        from_packages = {n.rpartition(".")[0] for n in names if n not in ours}  # a name of the package itself
        graph[module.name] = {name for name in found & ours if name not in longer or name in from_packages} - {
            module.name
        }
    return graph


def asking_docstrings(module: Module) -> Iterator[str]:
    """Yield the places of docstrings that begin with a question word."""
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            first = re.findall(r"[A-Za-z]+", ast.get_docstring(node) or "")[:1]
            if QUESTION_WORDS.intersection(word.lower() for word in first):
                yield module.at(node)


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods that have parameters and no underscore, nor has a class around them."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, FUNCTIONS) and not node.name.startswith("_") and not is_overload(node):
            every = (n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg))
            if any(name not in ("self", "cls") for name in every):
                yield node


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a signature of `typing.overload`, whose implementation has the docstring."""
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def duplicates(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names that occur twice or more, each with its places."""
    places: dict[str, list[str]] = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def measure_code(root: Path) -> Report:
    """Return the measures of the product's code under `root`, by name."""
    modules = load_modules(root)
    lines = sum((count_lines(module) for module in modules), Counter())
    classes = [(m, node) for m in modules for node in ast.walk(m.tree) if isinstance(node, ast.ClassDef)]
    constants = [(m, name, value) for m in modules for name, value in module_constants(m)]
    large = [(m, c) for m, c in classes if (c.end_lineno or 0) - c.lineno + 1 > MAX_CLASS_LINES]
    functions = [(m, f) for m in modules if "._" not in m.name for f in public_functions(m.tree.body)]
    return {
        **{f"lines, {kind}": lines[kind] for kind in ("all", "code", "docstring", "comment")},
        "module-level thresholds": [f"{m.name}.{name}" for m, name, value in constants if is_threshold(value)],
        "module-level regexes": [m.at(node) for m in modules for node in regexes(m)],
        "imports inside functions": sorted({m.at(node) for m in modules for node in inner_imports(m)}),
        "import cycles": [" ".join(cycle) for cycle in find_cycles(import_graph(modules))],
        "files over 500 lines": [m.name for m in modules if m.text.count("\n") > MAX_FILE_LINES],
        "classes over 300 lines": [f"{m.name}.{c.name}" for m, c in large],
        "duplicate file names": duplicates((m.path.name, m.name) for m in modules if m.path.name[:2] != "__"),
        "duplicate class names": duplicates((c.name, m.at(c)) for m, c in classes),
        "docstrings that begin with a question word": [place for m in modules for place in asking_docstrings(m)],
        "public functions with parameters": len(functions),
        "public functions without Args:": [m.at(f) for m, f in functions if "Args:" not in str(ast.get_docstring(f))],
    }


def paragraphs(text: str) -> Iterator[str]:
    """Yield the prose of a Markdown file: paragraphs and list items, without code, tables, headings and HTML."""
    text = re.sub(r"^\s*(```|~~~).*?^\s*\1", "\n", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        for item in re.split(r"^\s*(?:[-*+]|\d+\.)\s+", block, flags=re.MULTILINE):
            prose = [line for line in item.splitlines() if not re.match(r"\s*(\||#|<|!!!|!\[|:::|    )", line)]
            if words := " ".join(prose).split():
                yield " ".join(words)


def code_blocks(text: str) -> int:
    """Count fenced blocks, and blocks that are indented by four spaces outside lists."""
    fences = len(re.findall(r"^\s*(?:```|~~~)", text, flags=re.MULTILINE)) // 2
    outside = re.sub(r"^\s*(```|~~~).*?^\s*\1", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n\s*\n", outside)
    is_code = [bool(block) and all(line.startswith("    ") for line in block.splitlines()) for block in blocks]
    return fences + sum(code and block[:1] not in "-*1 " for block, code in zip(blocks, is_code[1:], strict=False))


def sentences(paragraph: str) -> list[int]:
    """Return the number of words of each sentence."""
    return [len(one.split()) for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[(])", paragraph) if one.strip()]


def measure_docs(root: Path) -> Report:
    """Return the measures of README.md and docs/ under `root`, by name."""
    files = [f for name in DOCS for f in ([root / name] if name.endswith(".md") else (root / name).rglob("*.md"))]
    texts = [file.read_text() for file in files if file.exists()]
    blocks = sum(map(code_blocks, texts))
    prose = [paragraph for text in texts for paragraph in paragraphs(text)]
    lengths = sorted(length for paragraph in prose for length in sentences(paragraph)) or [0]
    return {
        "docs, words": (words := sum(len(text.split()) for text in texts)),
        "docs, words per code block": words // max(1, blocks),
        "docs, words of a sentence, median": lengths[len(lengths) // 2],
        "docs, words of a sentence, 90 %": lengths[len(lengths) * 9 // 10],
        "docs, words of a sentence, longest": lengths[-1],
        "docs, words of the longest paragraph": max((len(paragraph.split()) for paragraph in prose), default=0),
    }


def measure(source: str) -> Report:
    """Return all measures of a folder, or of a commit of the repository around this file.

    Args:
        source: path of a checkout, or whatever `git archive` takes for a commit.
    """
    if Path(source).is_dir():
        return {**measure_code(Path(source)), **measure_docs(Path(source))}
    repository = Path(__file__).resolve().parent.parent
    archive = subprocess.run(["git", "archive", source], cwd=repository, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, members=[m for m in tar if m.name.split("/")[0] in (*PACKAGES, *DOCS) and not m.issym()])
        return measure(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", nargs="*", default=["."], help="folders or commits (default: .)")
    parser.add_argument("--list", action="store_true", help="print every finding of the last source")
    options = parser.parse_args(arguments)
    reports = [measure(source) for source in options.sources]
    print(f"{'':44}", *(f"{source[-10:]:>10}" for source in options.sources))
    for name, last in reports[-1].items():
        values = (report[name] for report in reports)
        print(f"{name:44}", *(f"{value if isinstance(value, int) else len(value):>10}" for value in values))
        if options.list and isinstance(last, list):
            print(*(f"    {finding}" for finding in last), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
