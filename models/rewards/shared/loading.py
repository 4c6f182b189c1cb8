"""Weights, tokenizers and preprocessing of reward models, from a folder or the Hub; errors are one line."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fluvial.models.hub import probe_hub
from fluvial.models.pipelines.folder import quietly
from fluvial.models.rewards.shared.pixels import Preprocess, read_preprocess
from fluvial.models.rewards.table import RewardModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# One of these makes a folder one of a tokenizer.
TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model", "vocab.txt")

Processor = tuple[str, str | None]  # folder or id of tokenizer and preprocessing, and commit


class LoadingError(ValueError):
    """A reward model cannot be built; the message is one line."""


@dataclass(eq=False)
class ModelReward(ABC):
    """Reward from a model of transformers, which is frozen.

    Args:
        weights: folder of the model, or id on the Hub.
        revision: commit on the Hub; by default that of the default weights.
        device: device of the model, e.g. "cuda:1"; by default that of the first samples.
        dtype: dtype of the model, "float32", "bfloat16" or "float16".
        batch: largest number of samples per forward pass.

    Raises:
        ValueError: the weights are not there or are of another model, or an option is wrong; in one line.
    """

    weights: str | Path
    _: KW_ONLY
    revision: str | None = None
    device: str | None = None
    dtype: str = "float32"
    batch: int = 16
    model: Any = field(init=False)
    tokenizer: Any = field(init=False)

    facts: ClassVar[RewardModel]

    def __post_init__(self) -> None:
        try:
            check_packages(self.facts)
            self.where, self.precision = _device(self.device), DTYPES[check_choice("dtype", self.dtype, DTYPES)]
            self.model = self.load(self.facts.commit(self.weights, self.revision))
        except LoadingError as error:
            raise LoadingError(f"{self.facts.name}: {error}") from error
        self.model.eval().requires_grad_(False).to(device=self.where, dtype=self.precision)

    @abstractmethod
    def load(self, commit: str | None) -> Any:
        """Return the model, and keep its tokenizer and preprocessing.

        Raises:
            LoadingError: something is missing or does not fit, in one line without the reward's name.
        """

    def place(self, samples: Tensor) -> torch.device:
        """Return the model's device; without one of its own, the model moves to that of the first samples."""
        if self.where is None:
            self.where = samples.device
            self.model.to(self.where)
        return self.where


def place_of(weights: str | Path) -> str:
    """Return a folder or file of weights as it is on disk, or an id on the Hub as it is.

    Raises:
        LoadingError: it is a path, and there is nothing at it.
    """
    path, text = Path(weights).expanduser(), str(weights)
    if path.exists():
        return str(path)
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise LoadingError(f"there is no file or folder {text}; expected one, or an id on the Hub as owner/name")
    return text


def load_model(kind: Any, weights: str | Path, revision: str | None) -> Any:
    """Return a model of a class of transformers with the weights of a folder, or of a commit on the Hub.

    Raises:
        LoadingError: there are no such weights, or they are of another architecture or incomplete.
    """
    from transformers import AutoConfig

    place, expected = place_of(weights), kind.config_class.model_type
    with quietly():
        config = fetch(f"the weights {weights}", AutoConfig.from_pretrained, place, revision=revision)
        if config.model_type != expected:
            raise LoadingError(f"the weights {weights} are of the architecture {config.model_type!r}, expected {expected!r}")
        model, report = fetch(
            f"the weights {weights}", kind.from_pretrained, place, revision=revision, output_loading_info=True
        )
    # Numbers of positions are constants that some versions of transformers saved.
    check_complete(weights, missing=[name for name in report["missing_keys"] if not name.endswith("_ids")])
    return model


def check_complete(weights: str | Path, *, missing: Sequence[str]) -> None:
    """Raise LoadingError if tensors are missing, which would be left as they were drawn."""
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LoadingError(f"the weights {weights} are incomplete: they lack {names[0]}{more}; download them again")


def check_packages(facts: RewardModel) -> None:
    """Raise LoadingError if a package that the reward needs is not installed."""
    if missing := facts.missing():
        raise LoadingError(f"{', '.join(missing)} is not installed: pip install '{facts.install}'")


def check_choice(option: str, value: str, choices: Collection[str]) -> str:
    """Return the value of an option; LoadingError if it is not one of the choices."""
    if value not in choices:
        raise LoadingError(f"{option} is {value!r}, expected one of {', '.join(choices)}")
    return value


def load_tokenizer(place: str, revision: str | None) -> Any:
    """Return the tokenizer of a folder or of an id on the Hub; LoadingError if there is none."""
    from transformers import AutoTokenizer

    with quietly():
        return fetch(f"the tokenizer of {place}", AutoTokenizer.from_pretrained, place, revision=revision)


def load_preprocess(place: str, revision: str | None) -> Preprocess:
    """Return the preprocessing of a folder or of an id on the Hub; LoadingError if there is none, or it is not supported."""
    from transformers.image_processing_utils import BaseImageProcessor

    with quietly():
        settings, _ = fetch(
            f"the image processor of {place}", BaseImageProcessor.get_image_processor_dict, place, revision=revision
        )
    try:
        return read_preprocess(settings)
    except ValueError as error:
        raise LoadingError(f"{place} cannot be used: {error}") from error


def hub_file(weights: str | Path, name: str, revision: str | None) -> Path:
    """Return the path of one file: `weights` itself, the file `name` in the folder `weights`, or of that id on the Hub.

    Raises:
        LoadingError: there is no such file.
    """
    place = place_of(weights)
    if Path(place).is_file():
        return Path(place)
    if Path(place).is_dir():
        if (Path(place) / name).is_file():
            return Path(place) / name
        raise LoadingError(f"the folder {place} has no file {name}")
    from huggingface_hub import hf_hub_download

    with quietly():
        return Path(fetch(f"{name} of {weights}", hf_hub_download, place, name, revision=revision))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a file of `torch.save`, unpickling nothing but tensors.

    A state dict under the key `state_dict` is taken from under it.

    Raises:
        LoadingError: the file cannot be read, or holds something else.
    """
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        loaded = attempt(f"the weights {file}", load_file, file)
    else:
        loaded = attempt(f"the weights {file}", torch.load, file, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise LoadingError(f"the weights {file} hold a {type(loaded).__name__}, expected tensors by name")
    return loaded


def find_processor(weights: str | Path, processor: str | None, default: Processor) -> Processor:
    """Return the folder or id, and the commit, that the tokenizer and the preprocessing come from.

    Args:
        weights: weights of the model.
        processor: folder or id that was asked for, or None.
        default: id and commit to take where `weights` is a folder without a tokenizer.
    """
    if processor is not None:
        return str(Path(processor).expanduser()), (default[1] if processor == default[0] else None)
    folder = Path(weights).expanduser()
    if any((folder / name).is_file() for name in TOKENIZERS):
        return str(folder), None
    return default


def _device(name: str | None) -> torch.device | None:
    """Return a device by its name, or None for None; LoadingError if there is no such device."""
    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LoadingError(f"device is {name!r}, which is not there ({first_line(error)})") from error
    return device


def attempt(what: str, function: Any, *args: Any, **options: Any) -> Any:
    """Return the result of a loading function; LoadingError in one line if it raises."""
    try:
        return function(*args, **options)
    except Exception as error:
        raise LoadingError(f"{what} cannot be loaded: {first_line(error)}") from error


def fetch(what: str, function: Any, place: str | Path, *args: Any, **options: Any) -> Any:
    """Return `attempt` of a function that downloads `place` from the Hub, unless that is a file or a folder."""
    with nullcontext() if Path(place).exists() else probe_hub():
        return attempt(what, function, place, *args, **options)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
