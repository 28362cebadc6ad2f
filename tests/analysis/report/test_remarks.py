"""Test the rules that generate a report's remarks on verdicts: each kind of remark appears where it applies.

A claim that is reproduced gives no remark.
"""

from dataclasses import replace

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import Claim, Margin, Part, Source
from fewbits.analysis.engine.statistics.estimates import Interval
from fewbits.analysis.views.numbers import bounds, effect, number
from fewbits.analysis.views.remarks import remarks_html, unreached

MARGIN = Margin(0.005, True, "r")
PART = Part("equal", arms=("block",))
FINDING = Finding(
    "block", Status.SUPPORTED, "as stated", "equal", 0.0001, Interval(-0.001, 0.001, 0.9), 3,
    margin=0.005, relative=True, p_for=0.01,
)  # fmt: skip


def verdict(name: str, outcome: Outcome, *findings: Finding, **changes: object) -> Verdict:
    claim = Claim(name, f"Statement of {name}.", (PART,), Source("Table 2", "said"), margin=MARGIN)
    return replace(Verdict(claim, outcome, "the reason", findings), **changes)  # type: ignore[arg-type]


def shown(*verdicts: Verdict) -> str:
    return str(remarks_html({one.claim.id: one for one in verdicts}))


def test_what_is_as_stated_is_no_remark() -> None:
    assert shown(verdict("M1", Outcome.REPRODUCED, FINDING)).strip().endswith("</div>\n<p>None.</p>")


def test_claims_that_are_not_reproduced_are_named() -> None:
    found = shown(verdict("M8", Outcome.CANNOT_TELL), verdict("M9", Outcome.NOT_REPRODUCED))
    assert "Statement of M9." in found
    assert 'href="#M9"' in found


def test_an_effect_that_decides_nothing_and_one_beyond_the_margin_are_named() -> None:
    there = replace(FINDING, status=Status.UNDECIDED, effect=0.0031, interval=Interval(0.001, 0.006, 0.9))
    assert "+0.31" in shown(verdict("M8", Outcome.CANNOT_TELL, there))
    large = replace(FINDING, status=Status.OPPOSED, effect=0.01, interval=Interval(0.008, 0.012, 0.9))
    assert "2.0 times the margin" in shown(verdict("M3", Outcome.NOT_REPRODUCED, large))


def test_one_control_that_failed_is_named_once_for_all_its_claims() -> None:
    failed = ControlResult("bad", "bad arm", (replace(FINDING, status=Status.UNDECIDED, reason="no effect"),))
    found = shown(*(verdict(name, Outcome.CANNOT_TELL, FINDING, controls=(failed,)) for name in ("M3", "M5")))
    assert found.count("bad arm: no effect") == 1
    assert "#M3" in found
    assert "#M5" in found
    untested = replace(failed, findings=(replace(FINDING, status=Status.UNDECIDED, p_for=None),))
    assert "bad arm" not in shown(verdict("M3", Outcome.CANNOT_TELL, FINDING, controls=(untested,)))


def test_what_is_out_of_reach_is_listed_with_its_reason() -> None:
    far = Finding("MMLU", Status.NOT_TESTABLE, "too large")
    text = str(unreached({"M4": verdict("M4", Outcome.NOT_TESTABLE, far)}))
    assert "Statement of M4. Too large." in text


def test_a_reason_that_several_claims_and_parts_share_is_listed_once() -> None:
    one, other = (Finding(name, Status.NOT_TESTABLE, "other seeds") for name in ("first", "second"))
    claims = {"M3": (one, other), "M5": (one,), "M8": (one, replace(FINDING, status=Status.SUPPORTED))}
    listed = unreached({name: verdict(name, Outcome.NOT_TESTABLE, *parts) for name, parts in claims.items()})
    assert listed == [(["M3", "M5"], "Other seeds."), (["M8"], "Statement of M8. First: other seeds.")]


def test_numbers_show_what_their_error_allows() -> None:
    assert number(-0.00001, 2) == "0.00"
    assert number(1.0e12) == "1 × 10¹²"
    assert number(-1234.5, 1) == "−1\N{NARROW NO-BREAK SPACE}234.5"
    assert effect(0.00123, 0.0002, True) == "+0.123\N{NARROW NO-BREAK SPACE}%"
    assert bounds(-0.001, 0.0015, True) == "[−0.10, +0.15]"
