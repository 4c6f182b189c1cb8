"""Entry point of the command line: calls the module of a command and converts errors to exit codes.

The module of a command has a function `run(args)`, which raises UsageError for wrong arguments. It may have its help in
USAGE.
"""

import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from fluvial.engines.cli import processes
from fluvial.engines.cli.listing import JSON, drop_flag, format_paragraphs
from fluvial.engines.cli.parse import HelpPrintedError
from fluvial.engines.errors import ElsewhereError, FluvialError, UsageError, describe_machine_failure
from fluvial.engines.run.process.stop import end_at_once, say_stopped
from fluvial.engines.waits import Waits, wait_for

PLAN = """Compute the memory of training, and the settings with which it fits. Without MODEL, with --rollout-seconds
                      and --update-seconds: how many servers keep a trainer busy."""
# Argument and description of each command.
COMMANDS = {
    "train": (
        "RECIPE",
        "Post-train a model. RECIPE is listed by train --help or runs, or is your own module:name or a file.",
    ),
    "runs": ("[NAME]", "List the published runs, or print one and its sources; runs ls lists your own in ./runs."),
    "config": ("RECIPE", "Print the settings that differ from a recipe, or all of them: a file for fluvial train my.toml."),
    "eval": ("MODEL", "Score samples of a model, a run or a checkpoint, and compare them with a base model."),
    "sample": ("MODEL", "Generate images of prompts into one PNG."),
    "export": ("RUN", "Write the weights of a run, or of one of its checkpoints, for diffusers or ComfyUI (--as)."),
    "push": ("FOLDER NAME", "Upload exported weights with their model card to the Hub; without --upload only list them."),
    "preferences": ("MODEL", "Generate samples, and write the best and the worst of each prompt to a folder for train dpo."),
    "serve": ("MODEL", "Serve rollouts over HTTP, for training runs elsewhere: fluvial serve handwriting --port 30000."),
    "serve-rewards": ("NAME", "Serve rewards over HTTP: fluvial serve-rewards pickscore ocr --port 8000."),
    "report": ("RUN ...", "Write the report of a run folder, or the comparison of several, as one HTML file."),
    "plan": ("MODEL", PLAN),
    "models": ("", "List the models that can be trained, with the memory of their weights."),
    "rewards": ("[NAME]", "List the reward models, or describe one; rewards vote lets people compare images as a reward."),
}
LISTED = "\n".join(f"  {f'{name} {argument}':<18}  {about}" for name, (argument, about) in COMMANDS.items())
USAGE = f"""usage: fluvial COMMAND NAME [--field value ...]

{LISTED}

MODEL is handwriting (a small SD3 transformer that writes 4-digit codes), handwriting-unet (a UNet that predicts epsilon) or
words (a small SD3 transformer that draws words; pip install 'fluvial[words]').
eval, sample and preferences also take the folder or the Hub id of a pipeline of diffusers, a run, or one of its checkpoints.
plan takes handwriting, sd3.5-medium, flux.1-dev, qwen-image, wan2.1-14b, the folder or the Hub id of a pipeline, and the
name of a published run (fluvial runs). fluvial COMMAND NAME --help lists the fields.
train, eval and serve take --processes N: they run on N processes of this machine (auto: one per GPU; without
GPUs two, where there are two cores). On several machines: torchrun --nnodes 2 ... -m fluvial.engines COMMAND NAME
Exit codes: 0 done or stopped as asked, 1 the run failed, 2 wrong input, 130 or 143 stopped at once by SIGINT or SIGTERM.
"""
UNREAD = 128 + signal.SIGPIPE  # exit code of a command whose output pipe is closed


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done (or stopped as asked), 1 the run failed, 2 wrong input."""
    exit_with(_dispatch, list(sys.argv[1:] if args is None else args))


def exit_with(command: Callable[[list[str]], int], args: list[str]) -> NoReturn:
    """Run a command line, and exit the process with its exit code."""
    interrupts = list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: end_at_once(number))
    signal.signal(signal.SIGINT, lambda number, frame: _interrupt(interrupts))
    # In the repository's root, Python must not import the folders `core`, `kernels`, ... as packages.
    sys.path[:] = [entry for entry in sys.path if not _holds_sources(entry)]
    if not _holds_sources(os.getcwd()):
        sys.path.append(os.getcwd())  # for user-defined modules; last, so that nothing there hides a package
    try:
        code = run(args, command)
    except BaseException:
        if interrupts:  # an interrupted import raises other errors
            end_at_once(signal.SIGINT)
        raise
    # Everything is written, and the process group is destroyed. A normal exit of the interpreter sometimes aborts because a
    # thread of gloo is still running (torch 2.13: about one exit in ten of several processes under load), which would make a
    # finished run look like a failed one.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(args: list[str], command: Callable[[list[str]], int] | None = None) -> int:
    """Run a command line, and return its exit code. Errors that the user can correct are printed in one line."""
    try:
        return (command or _dispatch)(args)
    except HelpPrintedError:
        return 0
    except ElsewhereError:
        return 1
    except UsageError as error:
        # Wrong input is wrong on every rank; one rank prints the error.
        if os.environ.get("RANK", "0") == "0":
            _complain(error)
        return 2
    except BrokenPipeError as error:
        if _is_read(sys.stdout):
            _complain(error)
            return 1
        return UNREAD
    except (FluvialError, OSError) as error:  # OSError: a full or lost disk, in any place
        _complain(error)
        return 1
    except (MemoryError, RuntimeError) as error:
        if (line := describe_machine_failure(error)) is None:
            raise
        _complain(line)
        return 1
    except KeyboardInterrupt:
        say_stopped(signal.SIGINT)
        return 128 + signal.SIGINT


def _interrupt(interrupts: list[int]) -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C, and end the process at the second."""
    if interrupts:
        end_at_once(signal.SIGINT)
    interrupts.append(signal.SIGINT)
    raise KeyboardInterrupt


def _is_read(stream: TextIO) -> bool:
    """Return whether the other end of a pipe is open; it is not after `fluvial ... | head`."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _complain(error: Exception | str) -> None:
    print(f"fluvial: {' '.join(str(error).split())}", file=sys.stderr)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"fluvial {version('fluvial')}")
        return 0
    if args[0] not in COMMANDS:
        raise UsageError(f"unknown command {args[0]!r}, expected one of {', '.join(COMMANDS)} (fluvial --help)")
    count, rest = processes.split(args)
    if count > 1 and not {"-h", "--help"} & set(rest):
        return processes.run(rest, count)
    silent = os.environ.get("RANK", "0") != "0"
    with contextlib.nullcontext() if silent else Waits(_complain), wait_for(f"importing what {args[0]} needs"):
        command = importlib.import_module(f"fluvial.engines.cli.{args[0].replace('-', '_')}")
    if drop_flag(rest[1:], JSON)[0][:1] in (["-h"], ["--help"]) and hasattr(command, "USAGE"):
        print(format_paragraphs(command.USAGE), end="")
        return 0
    with contextlib.nullcontext() if silent else Waits(_complain):
        command.run(rest[1:])
    return 0


def _holds_sources(entry: str) -> bool:
    """Return whether a sys.path entry is the root of the sources, whose `kernels` would hide Hugging Face's package."""
    root = os.path.abspath(entry or os.getcwd())
    return all(os.path.isfile(os.path.join(root, name, "__init__.py")) for name in ("core", "engines", "kernels")) and (
        os.path.isfile(os.path.join(root, "kernels", "dispatch.py"))
    )
