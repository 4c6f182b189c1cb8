"""Hooks of MkDocs: pages are the READMEs that the navigation names, and one page of reference per public module."""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Packages whose public modules have a page of reference.
PACKAGES = (
    *(
        "core",
        "kernels",
        "models",
        "models/pipelines",
        "models/replay",
        "models/modular",
        "models/rewards",
        "models/original",
    ),
    *("engines", "engines/run", "engines/methods", "engines/sampling", "engines/scoring", "engines/data", "engines/engine"),
    *("engines/run/jobs", "engines/run/evaluation", "engines/run/checkpoint", "engines/export", "tests/properties"),
)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
CONTENTS = re.compile(r"^1\. \[.*\n(?:\d+\. .*\n)+", re.MULTILINE)
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the reference to the navigation, and give headings the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    sections = [
        {dotted(Path(package)).partition(".")[2]: [reference(path) for path in modules(package)]} for package in PACKAGES
    ]
    config.nav.append({"API": [{"Overview": "api/index.md"}, *sections]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the navigation, their images, and the reference."""
    from mkdocs.structure.files import File

    for name in leaves(config.nav):
        if name.startswith("api/"):
            continue
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
        images = IMAGE.findall((ROOT / name).read_text(encoding="utf-8"))
        for image in {posixpath.normpath(posixpath.join(posixpath.dirname(name), image)) for image in images}:
            if files.get_file_from_path(image) is None:
                files.append(File.generated(config, image, abs_src_path=str(ROOT / image)))
    files.append(File.generated(config, "api/index.md", content=overview()))
    for path in (path for package in PACKAGES for path in modules(package)):
        content = f"---\ntitle: {path.stem}\n---\n\n::: {dotted(path)}\n"
        files.append(File.generated(config, reference(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Highlight examples with prompts as such, lead links to source files to their reference, and mark the contents."""
    here = posixpath.dirname(page.file.src_uri)
    if not here.startswith("api") and "\n## " not in markdown:
        page.meta["hide"] = ["toc"]

    def lead(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        name = posixpath.normpath(posixpath.join(here, target))
        if "://" in target or files.get_file_from_path(name) is not None:
            return match[0]
        found = files.get_file_from_path(f"api/{name.removesuffix('.py')}.md")
        return text if found is None else f"[{text}]({posixpath.relpath(found.src_uri, here or '.')})"

    markdown = CONTENTS.sub(r'<div class="contents" markdown>\n\n\g<0>\n</div>\n', markdown, count=1)
    markdown = re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)
    parts = re.split(r"^(```.*?^```)$", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)


def anchor(title: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading: lower case, without punctuation, spaces as hyphens."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def leaves(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


def modules(package: str) -> list[Path]:
    """Return the public modules of a package, relative to the tree."""
    found = sorted((ROOT / package).glob("[!_]*.py"))
    return [path.relative_to(ROOT) for path in found]


def dotted(path: Path) -> str:
    """Return the name by which a module is imported."""
    name = ".".join(("fluvial", *path.with_suffix("").parts)).removesuffix(".__init__")
    return name.replace(".tests.properties", ".testing")


def reference(path: Path) -> str:
    """Return the page of a module's reference."""
    return f"api/{path.with_suffix('.md').as_posix()}"


def overview() -> str:
    """Return the page that lists the packages: the names that each exports, and its modules with what they are."""
    lines = ["# API reference", ""]
    for package in PACKAGES:
        lines += [f"## {dotted(Path(package))}", ""]
        names = exports(ROOT / package / "__init__.py")
        if names:
            lines += [" · ".join(f"[`{name}`][{target}]" if target else f"`{name}`" for name, target in names), ""]
        lines += ["| module | content |", "|---|---|"]
        for path in modules(package):
            docstring = ast.get_docstring(parsed(ROOT / path)) or ""
            first = docstring.split("\n")[0].replace("|", "\\|")
            lines.append(f"| [{path.stem}]({path.relative_to('.').with_suffix('.md').as_posix()}) | {first} |")
        lines.append("")
    return "\n".join(lines)


def exports(path: Path) -> list[tuple[str, str]]:
    """Return the names that a package exports, and what is documented of each: its full name, or nothing."""
    imports = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.module]
    found = {alias.name: str(node.module) for node in imports for alias in node.names if "fluvial." in str(node.module)}
    return [(name, f"{module}.{name}" if name in documented(module) else "") for name, module in sorted(found.items())]


def documented(module: str) -> set[str]:
    """Return the functions and classes of a module that have a docstring."""
    path = (ROOT / module.removeprefix("fluvial.").replace(".", "/")).with_suffix(".py")
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = parsed(path).body if path.exists() else []
    return {node.name for node in nodes if isinstance(node, kinds) and ast.get_docstring(node)}


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))
