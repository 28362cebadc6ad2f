"""Test that the schematics in Figures 2 and D.1, whose numbers are computed, show what their captions state."""

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.studies.gaussws import schematics
from fewbits.sweeps.planning.plan import Plan

NOBODY = Results(Plan((), (), {}))


def test_a_cast_to_int4_swallows_uniform_noise_and_leaves_most_of_rounded_normal_noise() -> None:
    uniform, normal = schematics.noisy("uniform"), schematics.noisy("gaussian")
    assert int(uniform.swallowed.sum()) > 0.7 * int((uniform.noise != 0).sum())
    assert int(normal.swallowed.sum()) < 0.3 * int((normal.noise != 0).sum())


def test_only_vectors_part_forward_from_backward() -> None:
    """Check that in Figure D.1 the forward and backward weights are equal with square blocks, but not with vectors."""
    picture = schematics.figure_d1(NOBODY)
    assert isinstance(picture, FigureResult)
    assert "squares of 2: 0 of 16" in picture.notes[0]
    assert "vectors of 2: 0 of 16" not in picture.notes[0]
