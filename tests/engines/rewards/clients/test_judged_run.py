"""A training run whose reward is a VLM judge behind a chat server, over real connections."""

import base64
import io
import json
import math
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_jobs as tiny
from fake_servers import chat_reply, loopback
from PIL import Image

from fluvial.engines.errors import RunError
from fluvial.engines.fsdp.world import init_world


def test_a_run_learns_from_a_vlm_judge_and_stops_without_one(tmp_path: Path) -> None:
    """The VLM judge finds bright images good; a run whose server is away ends in one line before its first rollout."""
    questions: list[str] = []

    def vlm(handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or b"{}")
        answer: Any = {"data": [{"id": "tiny-vlm"}]}
        if request:
            image, text = request["messages"][0]["content"]
            questions.append(text["text"])
            file = base64.b64decode(image["image_url"]["url"].partition(",")[2])
            bright = float(np.asarray(Image.open(io.BytesIO(file))).mean()) / 255
            answer = chat_reply("Yes", {"Yes": math.log(bright + 1e-6), "No": math.log(1 - bright + 1e-6)})
        body = json.dumps(answer).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with init_world() as world:
        with loopback(vlm) as url:
            config = tiny.config(tmp_path / "run", rewards=(f"vlm_yes_no:url={url},timeout=20",))
            run = tiny.Run(config, world, tiny.job())
            record = run.rollout()
        assert 0 < record["reward"]["mean"] < 1
        assert all(text.startswith('Does this image show "') for text in questions)
        assert len(set(questions)) >= 2
        assert any(bool(tensor.any()) for tensor in run.gradient().values())
        away = tiny.config(tmp_path / "away", rewards=(f"vlm_yes_no:url={url},patience=0",))
        with pytest.raises(
            RunError, match=r"reward 'vlm_yes_no': http://127.0.0.1:\d+/v1/models cannot be reached: .*refused"
        ):
            tiny.Run(away, world, tiny.job()).rollout()
