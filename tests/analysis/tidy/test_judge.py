"""Test verdicts of claims that users write in a YAML file (`Runs.judge`)."""

from pathlib import Path

import pytest

from fewbits.analysis.tidy.runs import Runs, read, runs

CLAIMS = """
controls:
  - {id: wild, title: a wild arm is found to be worse, parts: [{test: higher, arms: [wild], metrics: [loss]}]}
claims:
  - id: mine
    statement: A threshold of 4.5 % is <like> one of 0.01 %.
    control: [wild]
    margin: {value: 0.5, relative: true, reason: no difference}
    parts:
      - {test: equal, arms: [mor], metrics: [loss], where: {recipe.threshold: "0.0001"}}
      - {test: equal, arms: [mor], metrics: [loss], where: {recipe.threshold: "0.045"}}
"""


@pytest.fixture
def sweep(trained: tuple[Path, Path]) -> Runs:
    where = (f"runtime.cache={trained[1]}", "runtime.device=cpu")
    return read(trained[0] / "tiny.yaml", *where, runs=trained[0] / "runs")


def test_a_claim_of_ones_own_gets_a_verdict(sweep: Runs, tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    judged = sweep.judge(tmp_path / "claims.yaml")
    assert judged["claim"].to_list() == ["mine", "mine"]
    assert judged["effect"].between(-0.5, 0.5).all()
    assert judged["n"].to_list() == [2, 2]
    assert "is &lt;like&gt; one" in str(judged._repr_html_())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: 1", "claims"),
        ("- a", "mapping"),
        (CLAIMS.replace("equal", "alike"), "'alike': valid values are"),
        (CLAIMS.replace("control: [wild]", "control: [tame]"), "tame"),
        ("claims: [{id: a, statement: b, parts: [{test: exact}]}]", "a: the test exact"),
    ],
)
def test_wrong_claims_are_refused(sweep: Runs, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        sweep.judge(tmp_path / "claims.yaml")
    with pytest.raises(ValueError, match=r"no-such\.yaml: No such file"):
        sweep.judge(tmp_path / "no-such.yaml")


def test_a_whole_store_has_no_arms_to_compare(sweep: Runs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fewbits\.read"):
        runs(sweep.store).judge(tmp_path / "claims.yaml")
