"""Registries: what a study has, in the paper's order, judged with its controls and corrected for together."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fewbits.analysis import registry
from fewbits.analysis.frames import Results
from fewbits.analysis.paper import Claim, Margin, paper
from fewbits.analysis.registry import claim, control, figure, judge_all, shelf, table
from fewbits.analysis.results import FigureResult, NotRun, TableCell, TableResult, TableRow, Value
from fewbits.analysis.statistics import Interval
from fewbits.analysis.verdicts import Differences, NoData, Outcome, Verdict, equivalent, every, exact, higher, lower
from fewbits.sweeps.planning.plan import Plan

OURS = Claim("own-1", "s", "", "lower", "loss", margin=Margin(0.001, True, "r"))
NULL = Differences((0.0001, -0.0001, 0.0), relative=True, trials=("aa",))
GREAT = Differences((0.10, 0.11, 0.12), relative=True, trials=("bb",))


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SHELVES", {})
    monkeypatch.setattr(registry, "load", lambda study: None)  # what these tests register is all there is


@pytest.fixture
def results(planned: Callable[..., Plan]) -> Results:
    return Results.of(planned())


def no_table(results: Results) -> NotRun:
    return NotRun("smoke")


def test_things_are_listed_in_the_papers_order_and_ours_come_last() -> None:
    for name in ("Table 3", "Table 2"):
        table("mor", name)(no_table)
    table("mor", "thresholds", "Thresholds from 2 to 8 %")(no_table)
    table("mor", "Table 1")(no_table)
    found = shelf("mor").tables
    assert [entry.id for entry in found] == ["Table 1", "Table 2", "Table 3", "thresholds"]
    assert [entry.of_paper for entry in found] == [True, True, True, False]
    assert found[1].title == paper("mor").table("Table 2").title
    assert found[3].title == "Thresholds from 2 to 8 %"


def test_what_the_paper_has_and_nobody_registered_is_known() -> None:
    assert len(shelf("mor").missing) == 4 + 21 + 19, "M4 is out of reach and needs no function"
    figure("mor", "Figure 5")(lambda results: NoData("none yet"))
    claim("mor", "M1")(lambda results: exact(True, "proved"))
    assert not {"Figure 5", "M1", "M4"} & set(shelf("mor").missing)
    assert [entry.id for entry in shelf("mor").claims] == ["M1", "M4"]


def test_what_the_paper_has_not_needs_words_of_its_own_and_nothing_is_there_twice() -> None:
    with pytest.raises(ValueError, match="table 'Table 9': valid values are Table 1, "):
        table("mor", "Table 9")(no_table)
    with pytest.raises(ValueError, match="claim 'M99'"):
        claim("mor", "M99")(lambda results: exact(True, ""))
    with pytest.raises(ValueError, match="its declaration is of own-1"):
        claim("mor", "own-2", OURS)(lambda results: exact(True, ""))
    table("mor", "Table 1")(no_table)
    with pytest.raises(ValueError, match="Table 1 is registered twice"):
        table("mor", "Table 1")(no_table)
    with pytest.raises(ValueError, match="study 'moar'"):
        shelf("moar")


def test_claims_are_judged_with_scale_and_control(results: Results) -> None:
    claim("mor", "M1")(lambda results: exact(True, "proved"))
    claim("mor", "M3")(lambda results: equivalent(NULL, 0.005))
    control("mor", "bad-arm", "e2m1 per tensor")(lambda results: higher(GREAT))
    found = judge_all("mor", results)
    assert list(found) == ["M1", "M3", "M4"]
    assert found["M3"].outcome is Outcome.REPRODUCED
    assert str(found["M3"]).startswith(f"reproduced at {results.scale}: ")
    assert found["M3"].control is not None
    assert found["M3"].control.passed
    assert found["M3"].control.trials == ("bb",)
    assert found["M1"].control is None
    assert found["M4"].outcome is Outcome.OUT_OF_REACH


def test_a_claim_whose_control_fails_or_is_nowhere_is_not_decided(results: Results) -> None:
    claim("mor", "M3")(lambda results: equivalent(NULL, 0.005))
    with pytest.raises(ValueError, match="claim M3: control 'bad-arm'"):
        judge_all("mor", results)
    control("mor", "bad-arm", "e2m1 per tensor")(lambda results: higher(NULL))
    verdict = judge_all("mor", results)["M3"]
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason.startswith("its control failed (e2m1 per tensor: ")


def test_a_claim_of_several_comparisons_has_its_own_margin_beside_theirs(results: Results) -> None:
    control("mor", "bad-arm", "e2m1 per tensor")(lambda results: higher(GREAT))
    claim("mor", "M3")(lambda results: every({"a": higher(GREAT), "b": equivalent(NULL, 0.001)}))
    found = judge_all("mor", results)["M3"]
    assert (found.margin, found.relative) == (0.005, True)
    assert [part.margin for _, part in found.parts] == [0.0, 0.001]


def test_a_study_is_corrected_for_as_a_whole(results: Results) -> None:
    weak = replace(GREAT, values=(0.010, 0.004, 0.013))
    open_ = replace(GREAT, values=(0.01, -0.012, 0.003))

    def alone(verdict: Verdict) -> Callable[[Results], Verdict]:
        return lambda results: verdict

    for i in range(1, 10):
        declared = Claim(f"own-{i}", "s", "", "lower", "loss", margin=Margin(0.001, True, "r"))
        claim("mor", f"own-{i}", declared)(alone(higher(weak if i == 1 else open_)))
    found = judge_all("mor", results)
    assert found["own-1"].outcome is Outcome.INCONCLUSIVE
    assert "alone reproduced" in found["own-1"].reason


def test_functions_see_real_results(results: Results) -> None:
    where = {"recipe.threshold": "0.0001"}

    @table("mor", "Table 2")
    def table_2(results: Results) -> TableResult:
        own = paper("mor").table("Table 2")
        cells = (
            TableCell(Value.of(results.sample("loss", "bf16")), own.value("loss", "c1-bf16"), own.source),
            TableCell(Value.of(results.sample("loss", "mor", where)), own.value("loss", "c1-tensor"), own.source),
            TableCell(NotRun("smoke"), own.value("loss", "c1-channel"), own.source),
        )
        return TableResult(("BF16", "Tensor", "Channel"), (TableRow("Training loss", cells, "nats"),))

    @claim("mor", "own-1", OURS)
    def own(results: Results) -> Verdict:
        return lower(results.paired("validation_loss", "mor", "bf16", where), 0.001)

    made = shelf("mor").tables[0].make(results)
    assert isinstance(made, TableResult)
    assert set(made.trials) == set(results.trials["id"][:4])
    (row,) = made.frame().to_dict("records")
    assert row["BF16: paper"] == 1.8033
    assert row["BF16: ours"] == results.trials["loss"][:2].mean()
    assert row["BF16: difference"] == row["BF16: ours"] - 1.8033
    assert row["BF16: seeds"] == 2
    assert row["Channel: ours"] == "not run at this scale (smoke)"
    assert list(row)[:5] == ["metric", "unit", "BF16: paper", "BF16: ours", "BF16: difference"]
    verdict = judge_all("mor", results)["own-1"]
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert len(verdict.trials) == 4


def test_a_value_keeps_its_interval_and_notes() -> None:
    value = Value.of(Differences((1.0, 3.0), trials=("aa",), notes=("bf16, seed 2: missing",), diverged=1))
    assert isinstance(value, Value)
    assert (value.mean, value.n, value.trials) == (2.0, 2, ("aa",))
    assert isinstance(value.interval, Interval)
    assert value.notes == ("bf16, seed 2: missing", "diverged: 1 of ours, 0 of the baseline")
    one = Value.of(Differences((1.0,)))
    assert isinstance(one, Value)
    assert one.interval is None
    assert Value.of(NoData("x")) == NoData("x")
    assert isinstance(Value.of(Differences((), diverged=2)), NoData)
    assert TableCell(NoData("x", ("cc",)), 1.0).difference is None
    assert TableCell(NoData("x", ("cc",)), 1.0).trials == ("cc",)
    with pytest.raises(ValueError, match="row a: 0 cells in 1 columns"):
        TableResult(("x",), (TableRow("a", ()),))


def test_a_figure_is_drawn_when_it_is_asked_for() -> None:
    from matplotlib.figure import Figure

    drawn = []

    @figure("mor", "Figure 5")
    def figure_5(results: Results) -> FigureResult:
        def draw() -> Figure:
            drawn.append(True)
            return Figure()

        return FigureResult(draw, ("aa",))

    (entry,) = shelf("mor").figures
    made = entry.make(Results(Plan((), (), {})))
    assert isinstance(made, FigureResult)
    assert not drawn
    assert isinstance(made.draw(), Figure)
