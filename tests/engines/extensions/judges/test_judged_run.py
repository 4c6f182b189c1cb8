"""A training run whose reward is a VLM judge behind a chat server, over real connections."""

from pathlib import Path

import pytest
import tiny_jobs as tiny
from fake_servers import YesNo, loopback

from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError


def test_a_run_learns_from_a_vlm_judge_and_stops_without_one(tmp_path: Path) -> None:
    """The VLM judge finds bright images good; a run whose server is away ends in one line before its first rollout."""
    vlm = YesNo()
    with init_world() as world:
        with loopback(vlm) as url:
            config = tiny.config(tmp_path / "run", rewards=(f"vlm_yes_no:url={url},timeout=20",))
            run = tiny.Run(config, world, tiny.job())
            record = run.rollout()
        assert 0 < record["reward"]["mean"] < 1
        assert all(text.startswith('Does this image show "') for text in vlm.questions)
        assert len(set(vlm.questions)) >= 2
        assert any(bool(tensor.any()) for tensor in run.gradient().values())
        away = tiny.config(tmp_path / "away", rewards=(f"vlm_yes_no:url={url},patience=0",))
        with pytest.raises(
            RunError, match=r"reward 'vlm_yes_no': http://127.0.0.1:\d+/v1/models cannot be reached: .*refused"
        ):
            tiny.Run(away, world, tiny.job()).rollout()
