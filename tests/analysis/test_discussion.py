"""The discussion is generated: each kind of surprise is found, and what is not one is not."""

import re

from fewbits.analysis.engine.data import Differences
from fewbits.analysis.engine.paper import Claim, Margin
from fewbits.analysis.registry import ClaimEntry
from fewbits.analysis.show.discussion import surprises, unreached
from fewbits.analysis.show.markup import bounds, effect, number
from fewbits.analysis.verdicts import (
    Control,
    Outcome,
    Verdict,
    controlled,
    corrected,
    equivalent,
    higher,
    lower,
    out_of_reach,
)


def entry(name: str, kind: str = "equal") -> ClaimEntry:
    far = kind == "out of reach"
    margin = None if far else Margin(0.005, True, "r")
    said = Claim(name, f"Statement of {name}.", "", kind, "loss", margin=margin, out_of_reach="far" if far else "")
    return ClaimEntry("mor", said, True, lambda results: out_of_reach(""))


def of(*values: float) -> Differences:
    return Differences(values, relative=True)


def said(entries: list[ClaimEntry], verdicts: dict[str, Verdict]) -> dict[str, str]:
    """By heading."""
    parts = re.split(r"<h3>(.*?)</h3>", surprises(entries, verdicts))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_what_is_as_said_is_no_surprise() -> None:
    found = surprises([entry("M1")], {"M1": equivalent(of(0.0001, 0.0002, 0.0), 0.005)})
    assert found == "<p>No verdict stands out.</p>"


def test_a_contradicted_claim_comes_first_with_what_was_found() -> None:
    found = said([entry("M8", "lower")], {"M8": lower(of(0.02, 0.021, 0.0205), 0.005)})
    assert next(iter(found)) == "Contradicted"
    assert "Statement of M8." in found["Contradicted"]
    assert "+2.050%" in found["Contradicted"]


def test_an_effect_of_another_size_than_said_is_named() -> None:
    found = said([entry("M8", "higher")], {"M8": higher(of(0.003, 0.0031, 0.0032), 0.005)})
    assert "+0.310%" in found["An effect, but not the one that was said"].replace("\N{NARROW NO-BREAK SPACE}", "")


def test_one_control_that_failed_is_said_once_for_all_its_claims() -> None:
    failed = Control("bad arm", False, "no data")
    verdicts = {name: controlled(equivalent(of(0.0, 0.0001, 0.0002), 0.005), failed) for name in ("M3", "M5")}
    (text,) = said([entry("M3"), entry("M5")], verdicts).values()
    assert text.count("bad arm: no data") == 1
    assert "#M3" in text
    assert "#M5" in text
    untested = controlled(equivalent(of(0.0, 0.0001, 0.0002), 0.005), Control("bad arm", False, "one", tested=False))
    assert not said([entry("M3")], {"M3": untested})


def test_too_few_seeds_and_what_did_not_survive_the_others_are_said() -> None:
    weak = equivalent(of(0.0, 0.01, -0.01), 0.005)
    assert "3 seeds find" in said([entry("M7")], {"M7": weak})["Too few seeds for the margin"]
    names = [f"M{n}" for n in range(1, 11)]
    verdicts = {name: higher(of(0.01, -0.012, 0.003)) for name in names} | {"M1": higher(of(0.010, 0.004, 0.013))}
    found = said([entry(name, "higher") for name in names], corrected(verdicts))
    assert "#M1" in found["Found alone, and not kept among all claims tested"]


def test_seeds_that_show_an_effect_to_be_smaller_than_said_are_not_too_few() -> None:
    small = higher(of(0.0011, 0.0, -0.0009), 0.002)
    assert small.mde is not None
    assert small.margin is not None
    assert small.mde > small.margin
    assert small.outcome is Outcome.INCONCLUSIVE
    assert "Too few seeds for the margin" not in said([entry("M8", "higher")], {"M8": small})


def test_what_is_out_of_reach_is_listed_with_its_reason() -> None:
    text = unreached([entry("M4", "out of reach")], {"M4": out_of_reach("too large")})
    assert "Statement of M4. Too large." in text


def test_numbers_show_what_their_error_allows() -> None:
    assert number(-0.00001, 2) == "0.00"
    assert number(1.0e12) == "1 × 10¹²"
    assert number(-1234.5, 1) == "−1\N{NARROW NO-BREAK SPACE}234.5"
    assert effect(0.00123, 0.0002, True) == "+0.123\N{NARROW NO-BREAK SPACE}%"
    assert bounds(-0.001, 0.0015, True) == "[−0.10, +0.15]"
