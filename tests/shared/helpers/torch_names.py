"""Names of torch that the product uses, with the keywords that it calls them with, and those that the oldest torch has.

Run by the oldest supported torch, `python -P tests/shared/helpers/torch_names.py` writes `oldest_torch.json`.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).with_name("oldest_torch.json")
FOLDERS = ("core", "kernels", "engines", "models", "bench", "tests/properties")


def find_used() -> dict[str, set[str]]:
    used: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}  # another thing of the same name
            imported = {local: name for local, name in _imports(tree) if local not in bound}
            for name in imported.values():
                used.setdefault(name, set())
            for node in ast.walk(tree):
                keywords = {word.arg for word in node.keywords if word.arg} if isinstance(node, ast.Call) else set()
                full = _full_name(node.func if isinstance(node, ast.Call) else node, imported)
                if full is not None:
                    used.setdefault(full, set()).update(keywords)
    return used


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _full_name(node: ast.AST, imported: dict[str, str]) -> str | None:
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in imported:
        return None
    return ".".join([imported[node.id], *parts])


def resolve(name: str) -> Any:
    found, path = importlib.import_module("torch"), "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                raise AttributeError(name) from None
    return found


def parameters(name: str) -> list[str] | None:
    try:
        known = inspect.signature(resolve(name)).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return None
    return list(known)


if __name__ == "__main__":
    RECORD.write_text(
        json.dumps({name: parameters(name) for name in sorted(find_used())}, indent=0) + "\n", encoding="utf-8"
    )
