"""What sources say in words, as settings: how windows of stochastic steps and noise levels are drawn."""

import re
from typing import Any

from fluvial.engines.rollout.window import WindowMoves

# Draws that amount to one per rollout, to all steps, or to the same steps in every call.
PER_ROLLOUT = (
    "none",
    "range equals",
    "random start per trainer step",
    "random.seed(0)",
    "fixed",
    "window size 0: all steps but",
)


def window_draw(text: str) -> dict[str, Any] | None:
    """Return the settings of `RolloutConfig` for a draw of the stochastic steps; None if fluvial has no such draw."""
    if "once per pipeline call" in text:
        return {"window_draw": "call"}
    if "per request" in text:
        return {"window_draw": "sample"}
    if moved := re.match(r"progressive: start moves by (\d+) every (\d+) iterations(, with roll-back)?", text):
        return {"moves": WindowMoves(every=int(moved[2]), stride=int(moved[1]), repeat=moved[3] is not None)}
    if moved := re.match(r"progressive, (\d+) rollouts per position, stride (\d+)", text):
        return {"moves": WindowMoves(every=int(moved[1]), stride=int(moved[2]), repeat=False)}
    if "need not be adjacent" in text:
        return {"contiguous": False}
    if text.startswith("frozen: overlap 0, steps 0-3"):
        return {"window_low": 0, "window_high": 4}
    if text.startswith("random.seed(0)") and "always start 3" in text:
        return {"window_low": 3, "window_high": 5}
    return {} if text.startswith(PER_ROLLOUT) else None
