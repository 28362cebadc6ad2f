"""Test the registry of tables and figures, and the Python classes of tables and figures.

The registry has the paper's tables and figures in the paper's order, then ours.
"""

import pytest

from fewbits.analysis.engine.results.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.statistics import Interval
from fewbits.analysis.report.items import TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import StudyRegistry, study_registry
from tests.messages import naming


def no_table(results: Results) -> NotPlanned:
    return NotPlanned("not run")


def test_things_are_listed_in_the_papers_order_and_ours_come_last() -> None:
    registry = StudyRegistry("mor")
    for name in ("Table 3", "Table 2"):
        registry.add_table(name, no_table)
    registry.add_table("thresholds", no_table, "Thresholds from 2 to 8 %")
    registry.add_table("Table 1", no_table)
    found = registry.tables
    assert [entry.id for entry in found] == ["Table 1", "Table 2", "Table 3", "thresholds"]
    assert [entry.of_paper for entry in found] == [True, True, True, False]
    assert found[1].title == paper("mor").table("Table 2").title
    assert found[3].title == "Thresholds from 2 to 8 %"


def missing(registry: StudyRegistry) -> set[str]:
    """Return the ids of the paper's tables and figures that nothing makes."""
    made = {*(entry.id for entry in registry.tables), *(entry.id for entry in registry.figures)}
    return {*registry.table_ids, *registry.figure_ids} - made


def test_ids_are_also_those_of_what_nothing_makes() -> None:
    registry = StudyRegistry("mor")
    assert len(missing(registry)) == 4 + 21
    registry.add_figure("Figure 5", lambda results: NoData("none yet"))
    assert "Figure 5" not in missing(registry)


def test_what_the_paper_has_not_needs_a_title_and_nothing_is_there_twice() -> None:
    registry = StudyRegistry("mor")
    with pytest.raises(ValueError, match="table 'Table 9': valid values are Table 1, "):
        registry.add_table("Table 9", no_table)
    registry.add_table("Table 1", no_table)
    with pytest.raises(ValueError, match="Table 1 is registered twice"):
        registry.add_table("Table 1", no_table)
    with pytest.raises(ValueError, match="study 'moar'"):
        study_registry("moar")


STUDIES = ("mor", "nvfp4", "gaussws", "primer")


@pytest.mark.parametrize("study", STUDIES)
def test_studies_are_complete(study: str) -> None:
    assert missing(study_registry(study)) == set()


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
    with pytest.raises(ValueError, match=naming("row a", "0 cells", "1 columns")):
        TableResult(("x",), (TableRow("a", ()),))


def test_a_tables_frame_has_the_papers_number_ours_and_the_reason_where_there_is_none() -> None:
    cells = (
        TableCell(Value(2.0, None, 1, ("aa",)), 1.5, "printed"),
        TableCell(NotPlanned("not run at this scale (x)")),
    )
    frame = TableResult(("BF16", "Channel"), (TableRow("Loss", cells, "nats"),)).frame()
    bf16, channel = frame.to_dict("records")
    assert (bf16["metric"], bf16["unit"], bf16["column"], bf16["note"]) == ("Loss", "nats", "BF16", "")
    assert (bf16["paper"], bf16["ours"], bf16["difference"], bf16["seeds"]) == (1.5, 2.0, 0.5, 1)
    assert channel["note"] == "not run at this scale (x)"
    assert all(frame[name].dtype == float for name in ("paper", "ours", "difference", "low", "high"))
    assert frame["ours"].isna().to_list() == [False, True]
