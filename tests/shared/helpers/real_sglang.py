"""The real sglang of one version, without its dependencies: its rollout modules import with empty parent packages.

`load` installs the wheel in a folder of its own, `build/sglang-VERSION`, once per clone. Packages above the modules that are
tested, and modules of devices, distributed runs and HTTP, are stand-ins.
"""

import __future__

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from functools import cache
from typing import Any

import pytest
from helpers import wheels

VERSION = "0.5.23"
TOP = "sglang.multimodal_gen"
PARENTS = (
    "sglang",
    TOP,
    f"{TOP}.runtime",
    f"{TOP}.runtime.models",
    f"{TOP}.runtime.models.schedulers",
    f"{TOP}.runtime.pipelines_core",
    f"{TOP}.runtime.pipelines_core.lora",
    f"{TOP}.runtime.post_training",
    f"{TOP}.runtime.entrypoints",
    f"{TOP}.runtime.entrypoints.post_training",
    f"{TOP}.runtime.entrypoints.openai",
)


def _router(*args: Any, **kwargs: Any) -> Any:
    return types.SimpleNamespace(post=lambda *args, **kwargs: lambda function: function)


# Names that the tested modules import from modules that are not run.
STAND_INS: dict[str, dict[str, Any]] = {
    "fastapi": {"APIRouter": _router, "HTTPException": RuntimeError, "Response": None},
    f"{TOP}.runtime.utils.logging_utils": {"init_logger": lambda name: None},
    f"{TOP}.runtime.pipelines_core.schedule_batch": {"Req": Any, "OutputBatch": Any},
    f"{TOP}.runtime.distributed": {"get_local_torch_device": lambda: "cpu", "get_sp_world_size": lambda: 1},
    f"{TOP}.runtime.distributed.communication_op": {"sequence_model_parallel_all_gather": None},
    f"{TOP}.configs.sample.sampling_params": {"generate_request_id": lambda: "request"},
    f"{TOP}.runtime.entrypoints.openai.utils": {"build_sampling_params": None},
    f"{TOP}.runtime.entrypoints.utils": {"prepare_request": None},
    f"{TOP}.runtime.managers.memory_managers.layerwise_offload": {
        "iter_materialized_weights": lambda module: module.named_parameters()
    },
    f"{TOP}.runtime.scheduler_client": {"async_scheduler_client": None},
    f"{TOP}.runtime.server_args": {"get_global_server_args": None},
}


@cache
def load() -> None:
    """Make sglang's rollout modules importable; skip the test if the package index has no such wheel."""
    pytest.importorskip("pydantic")
    wheels.empty_packages(wheels.install("sglang", VERSION), PARENTS)
    for name, names in STAND_INS.items():
        if name == "fastapi" and importlib.util.find_spec(name) is not None:
            continue
        module = types.ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module


def part(name: str) -> Any:
    """Return a module below `sglang.multimodal_gen.runtime`."""
    load()
    return wheels.module(f"{TOP}.runtime.{name}")


def _node(path: str, name: str, *kinds: type[ast.stmt]) -> Any:
    """Return the syntax tree of a function or a class of a file below the package sglang."""
    load()
    source = (wheels.install("sglang", VERSION) / "sglang" / path).read_text()
    return next(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and getattr(node, "name", "") == name
    )


def function(path: str, name: str, **names: Any) -> Any:
    """Return one function of a file of the wheel, which is compiled alone, without decorators.

    Args:
        path: path of the file below the package sglang.
        names: names that its body uses.
    """
    node = _node(path, name, ast.FunctionDef, ast.AsyncFunctionDef)
    node.decorator_list = []
    flags = __future__.annotations.compiler_flag  # its annotations are not evaluated
    exec(compile(ast.Module([node], []), path, "exec", flags=flags, dont_inherit=True), names)
    return names[name]


def form_of_edits() -> list[tuple[str, tuple[None, str]]]:
    """Return the fields of the form of its `/v1/images/edits` that are no files, each at its default."""
    node = _node("multimodal_gen/runtime/entrypoints/openai/image_api.py", "edits", ast.AsyncFunctionDef)
    arguments = node.args.args[-len(node.args.defaults) :]
    found = []
    for argument, default in zip(arguments, node.args.defaults, strict=True):
        value = default.args[0].value if getattr(default, "args", []) else None
        if default.func.id == "Form" and "url" not in argument.arg:
            text = "1" if value is ... else "" if value is None else str(value)
            found.append((argument.arg, (None, text)))
    return found


def fields(path: str, name: str) -> set[str]:
    body = _node(path, name, ast.ClassDef).body
    return {each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def http_client() -> Any:
    """Return the module of sglang's own HTTP client, that of its ComfyUI app; skip the test without requests."""
    pytest.importorskip("requests")
    load()
    path = wheels.install("sglang", VERSION) / "sglang/multimodal_gen/apps/ComfyUI_SGLDiffusion/core/server_api.py"
    spec = importlib.util.spec_from_file_location("sglang_server_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
