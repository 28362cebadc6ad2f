"""Write docs/measured/evidence.md: what the committed archives show about claims, one row for each comparison.

python docs/measured/evidence.py

docs/measured/evidence/STUDY-*.parquet are files results.parquet of reports, also of incomplete ones; the claims
of today judge them.
"""

from pathlib import Path

from fewbits import read
from fewbits.analysis.engine.claims.findings import Status
from fewbits.analysis.engine.results.archive import read_archive
from fewbits.analysis.views.shown import finding_row

FOLDER = Path(__file__).with_name("evidence")
HEAD = """\
# What the archives of runs show

Written by `docs/measured/evidence.py` from the files in the folder `evidence`, each the `results.parquet` of a
report; `fewbits report study=STUDY scale=SCALE --from FILE` continues it on another machine. Only comparisons whose
arms have run are listed. Effects are differences from the other arm, with a 90 % interval over seeds.
"""
COLUMNS = ("claim", "comparison", "effect", "90 % interval", "seeds", "margin", "shows")


def _made(path: Path) -> str:
    """Return a line with the number of trials in an archive, their commits and kinds of processors."""
    archive = read_archive(path)
    made = [archive.provenance(planned) for planned in archive.plan.trials.values()]
    commits = sorted({str(one["git"])[:8] for one in made if one["git"]})
    kinds = sorted({str(place["kind"]) for one in made for place in one["environments"]})
    return f"{len(made)} trials, commits {', '.join(commits)}, processors {', '.join(kinds)}."


def main() -> None:
    parts = [HEAD]
    for path in sorted(FOLDER.glob("*.parquet")):
        report = read(path).report
        parts.append(f"\n## {path.stem}\n\n{_made(path)}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n")
        for verdict in report.verdicts.values():
            for finding in verdict.findings:
                if finding.effect is None or finding.status in (Status.NOT_RUN, Status.NOT_TESTABLE):
                    continue
                row = finding_row(verdict, finding)
                interval = "" if row["low"] is None else f"{row['low']:+.4g} to {row['high']:+.4g}"
                margin = "" if row["margin"] is None else f"{row['margin']:.4g}"
                cells = (
                    row["claim"],
                    row["comparison"],
                    f"{row['effect']:+.4g}",
                    interval,
                    row["n"],
                    margin,
                    row["shows"],
                )
                parts.append(f"| {' | '.join(map(str, cells))} |\n")
    FOLDER.with_suffix(".md").write_text("".join(parts))


if __name__ == "__main__":
    main()
