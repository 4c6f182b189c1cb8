"""`fluvial push FOLDER OWNER/NAME`: upload exported weights with their model card to the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.cli.listing import format_paragraphs
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.engines.export.card import CARD

USAGE = """usage: fluvial push FOLDER OWNER/NAME [--upload] [--public]

Upload the folder of an export, or the weights of a run, with their model card to a repository of the Hugging Face Hub.

Without --upload it only prints the files. A new repository is private; --public makes it public. The account is that of
huggingface-cli login, or of the variable HF_TOKEN.
"""
FLAGS = ("--upload", "--public")


def run(args: Sequence[str]) -> None:
    """Print the files with their sizes, and upload them with --upload."""
    if set(args) & {"-h", "--help"}:
        print(format_paragraphs(USAGE), end="")
        return
    flags, words = ([word for word in args if word.startswith("-") == is_flag] for is_flag in (True, False))
    if unknown := [flag for flag in flags if flag not in FLAGS]:
        raise UsageError(f"unknown flag {unknown[0]} (fluvial push --help)")
    if len(words) != 2:
        raise UsageError(f"push takes a folder and OWNER/NAME, got {' '.join(words) or 'nothing'} (fluvial push --help)")
    folder, name = find_weights(Path(words[0])), words[1]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    with convert_errors(UsageError, HFValidationError, says="OWNER/NAME is wrong"):
        validate_repo_id(name)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        print(f"{path.stat().st_size / 1e6:10.1f} MB  {path.relative_to(folder)}")
    if "--upload" not in flags:
        print(f"nothing is uploaded: add --upload to send these {len(files)} files of {folder} to {name}")
        return
    with convert_errors(RunError, HfHubHTTPError, LocalTokenNotFoundError, OSError, says=f"{name} took no files"):
        api = HfApi()
        api.create_repo(name, private="--public" not in flags, exist_ok=True)
        print(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights trained with fluvial"))


def find_weights(folder: Path) -> Path:
    """Return the folder of weights with a card: the folder itself, or one in a run; UsageError if there is none."""
    for candidate in (folder, folder / "lora", folder / "weights"):
        if (candidate / CARD).is_file() and any(candidate.rglob("*.safetensors")):
            return candidate
    raise UsageError(
        f"{folder} holds no weights with a model card: name an export (fluvial export RUN), or a run that has ended"
    )
