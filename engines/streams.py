"""Every stream of randomness of a run, in one place.

Randomness is drawn from explicit keys (`core.random`). A key is split by folding in the number of a stream, so that draws
from one stream never depend on another. A stream has a parent, the key that it is folded into:

    rollout       fold_in(key(seed), update)              WINDOW, PROMPTS, SAMPLES, NOISING, MINIBATCH, FRACTION,
                                                          RENOISING, STEPPING, BACKPROP, IMAGES, REFILL; the round is
                                                          folded into REFILL, and PROMPTS, SAMPLES into that
      sample      fold_in(fold_in(rollout, SAMPLES), id)  INITIAL, STEPS; the step is folded into STEPS
      noising     fold_in(fold_in(rollout, NOISING), id)  LEVELS, NOISE; the level's index is folded into NOISE. The keys of
                                                          RENOISING and STEPPING are split so, too
    evaluation    key(evaluate.SEED)                      EVALUATION_*
    probe         key(diagnostics.SEED)                   PROBE_*
    order         order.derive_order_key(data_seed or seed)  EPOCHS; the source is folded in before, the epoch after
    preferences   key(seed) of `fluvial preferences`      PREFERENCE_*
    pretraining   fold_in(key(seed), update)              PRETRAIN_*
    rounding      key(optimizers.SEED)                    ROUNDING; the update, the parameter and the row are folded in

`evaluation`, `probe` and `preferences` pass keys of samples to `generate` too, which splits them as `sample` above.
The numbers are part of the results: with another number, a run has other results.
"""

from enum import IntEnum, unique
from typing import Literal

Parent = Literal["rollout", "sample", "noising", "evaluation", "probe", "preferences", "pretraining", "order", "rounding"]


@unique
class Stream(IntEnum):
    """A stream of randomness: the number that is folded into its parent's key, e.g. `fold_in(root, Stream.WINDOW)`.

    Importing this file fails if two streams of one parent have the same number; streams of different parents may share one.
    """

    parent: Parent

    def __new__(cls, parent: Parent, number: int) -> "Stream":
        """Return the member with the value `number`, unique among the streams of its parent."""
        stream = int.__new__(cls, number)
        stream._value_ = (parent, number)  # type: ignore[assignment]
        stream.parent = parent
        return stream

    WINDOW = "rollout", 0  # position of the stochastic steps
    PROMPTS = "rollout", 1  # choice of prompts, or of preferences of a dataset
    SAMPLES = "rollout", 2
    SIZE = "rollout", 3  # size of the samples, if it is drawn
    CAPTIONS = "rollout", 4  # choice of images of a caption; the number of the group is folded in
    NOISING = "rollout", 10  # noise added to clean samples
    MINIBATCH = "rollout", 11  # order of samples in minibatches; the epoch is folded in
    FRACTION = "rollout", 12  # recorded steps of each sample that are trained on
    RENOISING = "rollout", 13  # noise added to samples of recorded steps; number of the draw and place are folded in
    STEPPING = "rollout", 15  # noise of steps back from there; number of the draw and place are folded in
    IMAGES = "rollout", 16  # images of a dataset for the prompts of a rollout
    REFILL = "rollout", 14  # replacement samples
    BACKPROP = "rollout", 20  # path of a reward's gradient: number of last steps, or levels
    INITIAL = "sample", 0  # initial noise
    STEPS = "sample", 1  # noise of the steps
    LEVELS = "noising", 0  # noise levels
    NOISE = "noising", 1
    EVALUATION_PROMPTS = "evaluation", 0
    EVALUATION_SAMPLES = "evaluation", 1
    PROBE_SAMPLES = "probe", 0
    PROBE_NOISE = "probe", 1
    PREFERENCE_PROMPTS = "preferences", 0
    PREFERENCE_SAMPLES = "preferences", 1
    EPOCHS = "order", 0
    FURTHER = "order", 2  # order of replacement prompts
    SIZES = "order", 1  # order of the prompts of one size; the number of the size is folded in
    PRETRAIN_PROMPTS = "pretraining", 0
    PRETRAIN_IMAGES = "pretraining", 1
    PRETRAIN_NOISE = "pretraining", 2
    PRETRAIN_LEVELS = "pretraining", 3
    PRETRAIN_ERRORS = "pretraining", 4
    ROUNDING = "rounding", 0  # of trained weights to bfloat16
