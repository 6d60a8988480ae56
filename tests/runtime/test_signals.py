"""The window of signals: decayed sums, real tokens, one table for some steps."""

import numpy as np
import pytest

from pagedweight.core.calibration import Calibration
from pagedweight.runtime.messages import Signals
from pagedweight.runtime.signals import SignalWindow

LEVELS = (2, 3)


def window(**options):
    sensitivity = np.ones((1, 4, 2, 2))
    calibration = Calibration(LEVELS, sensitivity, np.full((1, 4), 0.25), None, True, ())
    return SignalWindow(calibration, top_k=2, prior_tokens=0.0, **options)


def routed(*tokens):
    counts = np.array([tokens], np.float32)
    return Signals(counts / 2, counts, np.zeros((1, 4, 2, 3), np.float32))


def test_nothing_routed_is_no_table():
    seen = window()
    assert seen.current(1) is None
    seen.add(routed(0, 0, 0, 0))
    assert seen.current(2) is None


def test_mass_is_a_decayed_share():
    seen = window(keep=0.5, refresh_steps=1)
    seen.add(routed(8, 0, 0, 0))
    assert seen.current(1).mass.tolist() == [[1, 0, 0, 0]]
    seen.add(routed(0, 4, 0, 0))
    assert seen.current(2).mass[0].tolist() == pytest.approx([0.5, 0.5, 0, 0])
    seen.add(routed(0, 0, 0, 0))
    assert seen.current(3).mass[0, 0] == pytest.approx(0.5), "idle steps forget nothing"


def test_the_table_stays_the_same_object_between_refreshes():
    seen = window(refresh_steps=10)
    seen.add(routed(1, 1, 0, 0))
    first = seen.current(5)
    seen.add(routed(0, 0, 9, 9))
    assert seen.current(14) is first
    assert seen.current(15) is not first
