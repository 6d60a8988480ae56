"""The bits that the options ask for."""

from __future__ import annotations

import numpy as np

from pagedweight.checkpoint.plan import load_plan, uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.serving.options import ServeOptions


def plan_of(checkpoint: Checkpoint, options: ServeOptions) -> np.ndarray:
    """Bits int8 [L, E, 2] that the options ask for: a plan file, a level, or the highest level."""
    if options.plan is not None:
        return load_plan(options.plan, checkpoint)
    return uniform_plan(
        checkpoint, options.bits if options.bits is not None else checkpoint.bits[-1]
    )
