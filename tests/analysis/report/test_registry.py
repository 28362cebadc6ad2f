"""Test the registry of tables and figures, and the Python class of tables."""

import pytest

from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.items import TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import study_registry

STUDIES = ("mor", "nvfp4", "gaussws", "primer")


@pytest.mark.parametrize("study", STUDIES)
def test_studies_are_complete(study: str) -> None:
    registry, printed = study_registry(study), paper(study)
    tables, figures = [one.id for one in printed.tables], [one.id for one in printed.figures]
    assert [*registry.tables][: len(tables)] == tables, "the paper's, in its order, come first"
    assert [*registry.figures][: len(figures)] == figures


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
