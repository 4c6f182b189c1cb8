"""List what a command can be given a name of, without importing torch: `--help` must answer at once."""

import ast
from importlib.metadata import entry_points
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "train" / "recipes.py"
BUILT_IN = {
    "handwriting": "a small SD3 transformer that writes 4-digit codes (predicts a velocity)",
    "handwriting-unet": "a small UNet that writes them (predicts epsilon)",
    "words": "a small SD3 transformer that draws words of 3 to 6 letters (predicts a velocity)",
}


def recipes() -> dict[str, str]:
    """Return the first line of each built-in recipe's docstring, by name, read from the source."""
    tree = ast.parse(RECIPES.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    summaries = {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in functions}
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "RECIPES"
    ]
    assert isinstance(table, ast.Dict)
    rows = zip(table.keys, table.values, strict=True)
    return {ast.literal_eval(name): summaries[row.id] for name, row in rows if name and isinstance(row, ast.Name)}


def installed(group: str) -> dict[str, str]:
    """Return where each entry point of `fluvial.<group>` comes from, by name, without importing it."""
    return {
        point.name: f"from {point.dist.name} ({point.value})" if point.dist is not None else point.value
        for point in entry_points(group=f"fluvial.{group}")
    }
