"""Encoded prompts: encoded alone, cached on disk, padded without effect if the network has a mask, refused if too long."""

import json
import shutil
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from helpers.marks import Folders
from helpers.refusals import refuses
from helpers.tiny_pipelines import ROWS, TEXT, each_text_row, opened, start
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.models.pipelines.base import Pipeline


@each_text_row
def test_prompts_are_encoded_alone_and_padding_counts_unless_it_is_masked(name: str, folders: Folders) -> None:
    row, folder = ROWS[name], folders(name)
    short, long = (opened(name, folder, text_tokens=tokens) for tokens in (TEXT, TEXT + 9))
    module, x, sigma = short.build(), start(short, 3, row.sizes[0]), torch.tensor([0.9, 0.5, 0.1])
    conds = [model.encode(row.prompts) for model in (short, long)]
    assert [tensor.shape for tensor in optree.tree_leaves(conds[0])] != [each.shape for each in optree.tree_leaves(conds[1])]
    found, padded = (model.predict(module, x, sigma, cond) for model, cond in zip((short, long), conds, strict=True))
    far = (found - padded).abs().max()
    assert far < 1e-5 if row.masks else far > 1e-4
    row, model = ROWS[name], opened(name, folders(name))
    prompts = [row.prompts[0], "", row.prompts[1], row.prompts[0]]
    together = optree.tree_leaves(model.encode(prompts))
    for place, prompt in enumerate(prompts):
        for mine, tensor in zip(optree.tree_leaves(model.encode([prompt])), together, strict=True):
            assert torch.equal(mine[0], tensor[place])
            assert tensor.device.type == "cpu"
            assert not tensor.requires_grad
            assert not tensor.is_inference()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.masks])
def test_padding_never_changes_a_masked_prediction(name: str, folders: Folders) -> None:
    """Longer padding, padding of any values, and padding cut to the longest prompt of the batch have no effect."""
    row, model = ROWS[name], opened(name, folders(name))
    module, x, sigma = model.build(), start(model, 3, row.sizes[0]), torch.tensor([0.9, 0.5, 0.1])
    cond: Any = model.encode(row.prompts)
    lengths = cond.mask.sum(1) if hasattr(cond, "mask") else cond.lengths
    with torch.no_grad():
        v = model.predict(module, x, sigma, cond)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(tokens=st.integers(int(lengths.max()), 2 * TEXT), junk=st.floats(-100, 100), seed=st.integers(0, 9))
    def holds(tokens: int, junk: float, seed: int) -> None:
        own = torch.arange(tokens) < lengths[:, None]
        padding = junk * torch.randn(3, tokens, cond.tokens.shape[2], generator=torch.Generator().manual_seed(seed))
        kept = min(tokens, cond.tokens.shape[1])
        padding[:, :kept] = torch.where(own[:, :kept, None], cond.tokens[:, :kept], padding[:, :kept])
        padded = cond._replace(tokens=padding, **({"mask": own} if hasattr(cond, "mask") else {}))
        with torch.no_grad():
            torch.testing.assert_close(model.predict(module, x, sigma, padded), v, rtol=1e-4, atol=1e-5)

    holds()


@each_text_row
def test_encoded_prompts_are_cached_on_disk(
    name: str, tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, folder = ROWS[name], folders(name)
    plain = opened(name, folder).encode(row.prompts)
    first = opened(name, folder, cache=tmp_path / "texts")
    first.encode(row.prompts)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "texts").iterdir()}
    assert len(files) == len(row.prompts)
    again = opened(name, folder, cache=tmp_path / "texts")
    monkeypatch.setattr(again, "_load_parts", None)
    cached = again.encode(row.prompts)
    assert type(cached) is type(plain)
    assert all(
        torch.equal(mine, other) for mine, other in zip(optree.tree_leaves(cached), optree.tree_leaves(plain), strict=True)
    )
    assert {file: file.stat().st_mtime_ns for file in files} == files
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    others = [file for file in changed.rglob("*.safetensors") if "text_encoder" in str(file)]
    weights = bytearray(others[-1].read_bytes())
    weights[len(weights) * 2 // 3] ^= 1  # one bit, far from both ends
    others[-1].write_bytes(weights)
    opened(name, changed, cache=first.cache).encode(row.prompts[:1])
    index = changed / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "of_a_later_version": 1}))
    opened(name, changed, cache=first.cache).encode(row.prompts[:1])
    opened(name, folder, cache=first.cache, text_tokens=TEXT + 1).encode(row.prompts[:1])
    assert len(list((tmp_path / "texts").iterdir())) == len(files) + 3
    for file in files:
        file.write_bytes(b"short")
    refuses(r"the encoded prompt .* cannot be read: .*; delete the file", again.encode, row.prompts)


@each_text_row
def test_a_long_prompt_is_refused(name: str, folders: Folders) -> None:
    """One line names the number of tokens; the longest prompt that fits is accepted; `encode` refuses it too."""
    model = opened(name, folders(name))
    tokenizer, most = model.find_token_limit(model._load_parts("tokenizer"))
    words = "b " * 90
    lengths = [length for length in range(1, 90) if fits(model, words[: 2 * length])]
    assert lengths == list(range(1, lengths[-1] + 1))
    taken, refused = (len(tokenizer(words[: 2 * length]).input_ids) for length in (lengths[-1], lengths[-1] + 1))
    assert taken <= most < refused
    for ask in (model.check_prompt, lambda prompt: model.encode([prompt])):
        refuses(rf"the prompt 'b b .*'\.\.\. has \d+ tokens, expected at most {most}", ask, words)


def fits(model: Pipeline, prompt: str) -> bool:
    try:
        model.check_prompt(prompt)
    except ValueError:
        return False
    return True


def test_a_template_around_a_prompt_is_counted(folders: Folders) -> None:
    for name in ("qwen-image", "z-image"):
        model = opened(name, folders(name))
        counts = []
        for length in range(1, TEXT):
            if fits(model, prompt := "b " * length):
                cond: Any = model.encode([prompt])
                counts.append(int(cond.mask.sum() if name == "qwen-image" else cond.lengths))
        assert counts == list(range(TEXT + 1 - len(counts), TEXT + 1)), name
        assert len(counts) > 20, name
