"""`fluvial push`: it lists by default, uploads what it listed, and says in one line what keeps it from doing so."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from fluvial.engines.cli import push
from fluvial.engines.errors import RunError, UsageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with an adapter and its card."""
    (tmp_path / "run" / "lora").mkdir(parents=True)
    for name in ("README.md", "pytorch_lora_weights.safetensors"):
        (tmp_path / "run" / "lora" / name).write_bytes(b"x" * 100)
    return tmp_path / "run"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the Hub."""
    found: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            found.append((name, options))
            if name == "nobody/x":
                raise LocalTokenNotFoundError("Token is required,\nbut no token found.")

        def upload_folder(self, **options: Any) -> str:
            found.append(("upload", options))
            return "https://huggingface.co/me/fox"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return found


def test_it_lists_and_uploads_only_when_asked(run: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    push.run([str(run), "me/fox"])
    said = capsys.readouterr().out
    assert "README.md" in said
    assert "add --upload to send these 2 files" in said
    assert calls == []
    push.run([str(run), "me/fox", "--upload"])
    assert calls[0] == ("me/fox", {"private": True, "exist_ok": True})
    assert {name: calls[1][1][name] for name in ("repo_id", "folder_path")} == {
        "repo_id": "me/fox",
        "folder_path": run / "lora",
    }
    assert capsys.readouterr().out.splitlines()[-1] == "https://huggingface.co/me/fox"
    push.run([str(run / "lora"), "me/fox", "--upload", "--public"])
    assert calls[2][1]["private"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "takes a folder and OWNER/NAME, got nothing"),
        (["RUN", "me/fox", "--uplod"], "unknown flag --uplod"),
        (["RUN/nowhere", "me/fox"], "holds no weights with a model card: name an export"),
        (["RUN", "me/fox/x"], "OWNER/NAME is wrong: "),
        (["RUN", "nobody/x", "--upload"], "nobody/x took no files: Token is required, but no token found."),
    ],
)
def test_what_it_refuses(run: Path, calls: list[Any], words: list[str], says: str) -> None:
    with pytest.raises((UsageError, RunError), match=says) as refused:
        push.run([word.replace("RUN", str(run)) for word in words])
    assert "\n" not in str(refused.value)
