"""Test verdicts of claims that users write in a YAML file (`Runs.judge` and `fewbits claims --claims`)."""

import json
import re
import shutil
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.analysis.tidy.runs import Runs, read
from tests.messages import naming

PAGE = Path(__file__).parents[3] / "docs" / "claims-file.md"
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
      - {test: equal, arms: [mor], metrics: [loss], where: {recipe.threshold: 0.045}}
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


def test_the_pages_example_is_judged(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "claims.yaml").write_text(example)
    of = (str(trained[0] / "tiny.yaml"), f"runtime.cache={trained[1]}", "runtime.device=cpu")
    where = ("--runs", str(trained[0] / "runs"), "--claims", str(tmp_path / "claims.yaml"))
    assert cli.main(["claims", *of, *where, "--json"]) == 0
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert list(claims) == ["same-loss", "mostly-e4m3", "gradients-grow"]
    findings = [finding for claim in claims.values() for finding in claim["findings"]]
    assert [finding["n"] for finding in findings] == [2] * 4, "each comparison has a number for each of the two seeds"
    assert {claim["outcome"] for claim in claims.values()} == {"cannot tell"}, "two seeds decide nothing"
    assert cli.main(["claims", *of, *where]) == 0
    assert "gradients-grow" in capsys.readouterr().out


def test_claims_without_finished_trials_say_which_and_how_to_run_them(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, store = str(shutil.copy(trained[0] / "tiny.yaml", tmp_path)), tmp_path / "no store"
    store.mkdir()
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    of = (sweep, f"runtime.cache={trained[1]}", "runtime.device=cpu", "--runs", str(store))
    assert cli.main(["claims", *of, "--claims", str(tmp_path / "claims.yaml"), "--json"]) == 0
    mine = json.loads(capsys.readouterr().out)["claims"]["mine"]
    assert mine["outcome"] == "not run"
    named = ("6 trials", "bf16, seed 0 (planned)", f"fewbits sweep {sweep}", f"--runs '{store}'")
    assert re.search(naming(*named), mine["reason"])
    assert "wild" not in mine["reason"], "the trials of the control are not those of the claim"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: 1", "claims"),
        ("claims: []", "at least one"),
        ("- a", "mapping"),
        (CLAIMS.replace("equal", "alike"), "'alike': valid values are"),
        (CLAIMS.replace("control: [wild]", "control: [tame]"), "tame"),
        (CLAIMS.replace("relative: true", "relative: false"), "relative: true"),
        (CLAIMS.replace("arms: [wild]", "arms: [mild]"), naming("wild: arm 'mild'", "bf16, mor, wild")),
        (CLAIMS.replace("arms: [mor]", "baseline: fp32, arms: [mor]"), naming("baseline 'fp32'", "bf16, mor, wild")),
        (CLAIMS.replace("0.045", "0.05"), naming("mine: recipe.threshold of mor '0.05'", "0.0001, 0.045")),
        (CLAIMS.replace("recipe.thr", "thr"), naming("axis of mor 'threshold'", "recipe.threshold")),
        (CLAIMS.replace('{recipe.threshold: "0.0001"}', "{}"), naming("exactly one", "recipe.threshold=0.0001")),
        (CLAIMS.replace("arms: [mor]", "wrong: [none], arms: [mor]"), naming("arm 'none'", "bf16, mor, wild")),
        (CLAIMS.replace("arms: [mor]", "sweep: [big], arms: [mor]"), naming("sweep 'big'", "tiny")),
        (CLAIMS.replace("metrics: [loss], where", "metrics: [los], where"), naming("metric 'los'", "loss")),
        ("claims: [{id: a, statement: b, parts: [{test: exact}]}]", "a: the test exact"),
        ("claims: [{id: a, statement: b, parts: [{test: higher, data: c}]}]", "a: the key data"),
    ],
)
def test_wrong_claims_are_refused(sweep: Runs, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        sweep.judge(tmp_path / "claims.yaml")
    with pytest.raises(ValueError, match=r"no-such\.yaml: No such file"):
        sweep.judge(tmp_path / "no-such.yaml")
