"""The folder of an export: complete or absent, and never written over another one."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.export.model_folder import writing
from fluvial.engines.files import sync

RECORD = "fluvial.json"  # says what an export holds, beside it


def is_exported(out: Path, record: dict[str, Any]) -> bool:
    """Return whether a folder holds an export already; False if there is nothing yet.

    Args:
        out: folder.
        record: what the export holds, as JSON.

    Raises:
        UsageError: something else is there.
    """
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        held = json.loads((out / RECORD).read_text(encoding="utf-8"))
        files = held.pop("files")
        whole = all((out / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError, KeyError):
        held, whole = None, False
    if held != record or not whole:
        other = "another export" if held is not None else "files of something else"
        raise UsageError(f"`out` is {out}, which holds {other}: name another folder, or remove it")
    return True


@contextmanager
def open_draft(out: Path, record: dict[str, Any], world: World) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `out` when the context ends without an error. Every rank must take part.

    Args:
        out: folder of the export; an earlier one there is replaced.
        record: what the export holds, as JSON; it is written beside it, with the size of each file.
        world: process group that exports.

    Raises:
        RunError: the folder cannot be written; `out` is as before.
    """
    draft = out.with_name(f".{out.name}.partial")
    try:
        with writing(out, world, "export"):
            if world.is_main:
                shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
                draft.mkdir(parents=True)
        yield draft
        with writing(out, world, "export"):
            if world.is_main:
                files = sorted(path for path in draft.rglob("*") if path.is_file())
                sizes = {path.relative_to(draft).as_posix(): path.stat().st_size for path in files}
                (draft / RECORD).write_text(json.dumps({**record, "files": sizes}, indent=1) + "\n", encoding="utf-8")
                for path in (*files, draft / RECORD, draft):
                    sync(path)
                if out.exists():
                    shutil.rmtree(out)
                os.rename(draft, out)
                sync(out.parent)
    finally:
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
