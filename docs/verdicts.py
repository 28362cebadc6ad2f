"""Write the table of verdicts in README.md from stored verdicts of reports, so that nobody types a result by hand.

    make reproduce SCALE=cpu
    python docs/verdicts.py reports/*-cpu/verdicts.json

stores the verdicts as docs/verdicts/STUDY-SCALE.json and writes the table; without files, it only writes the table from
the stored verdicts. Incomplete reports, and reports on trials that other code computed, are refused.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fewbits.analysis.engine.claims.findings import Outcome
from fewbits.experiments.identity import commit
from fewbits.sweeps.planning.studies import STUDIES

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "verdicts"
BEGIN, END = "<!-- verdicts: written by docs/verdicts.py -->\n", "<!-- end of verdicts -->\n"
# The columns that the table always has; other outcomes have one if a stored verdict is of that kind.
ALWAYS = (Outcome.REPRODUCED, Outcome.CONTRADICTED, Outcome.INCONCLUSIVE)


def main(reports: Sequence[str]) -> None:
    for report in reports:
        record = stored(json.loads(Path(report).read_text("utf-8")), report)
        STORED.mkdir(exist_ok=True)
        file = STORED / f"{record['study']}-{record['scale']}.json"
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text("utf-8"), table(records(STORED))), "utf-8")


def stored(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what is stored of a report's verdicts.json; raise SystemExit if the report has warnings."""
    if warnings := [*report["flags"], *report["notices"]]:
        raise SystemExit(f"{name}: {len(warnings)} warnings, so its verdicts are not stored; the first: {warnings[0]}")
    verdicts = {claim: verdict["outcome"] for claim, verdict in report["claims"].items()}
    kept = {key: report[key] for key in ("study", "scale", "size")}
    return {**kept, "commit": (commit() or "unknown")[:10], "verdicts": verdicts}


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the stored verdicts, in the order of the studies."""
    unsorted = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(unsorted, key=lambda record: list(STUDIES).index(record["study"]))


def table(stored_verdicts: Iterable[Mapping[str, Any]]) -> str:
    """Return the table in Markdown: a row for each study and scale, with the claims of each outcome."""
    rows = list(stored_verdicts)
    had = {verdict for record in rows for verdict in record["verdicts"].values()}
    outcomes = [outcome for outcome in Outcome if outcome in (*ALWAYS, *had)]
    lines = [f"| study | runs | {' | '.join(outcomes)} |", "|---" * (2 + len(outcomes)) + "|"]
    for study in STUDIES.values():
        title = study.title.partition(":")[0]
        link = f"[{title}](https://arxiv.org/abs/{study.arxiv})" if study.arxiv else title
        own = [record for record in rows if record["study"] == study.name]
        lines += [f"| {link} | {_runs(record)} | {_cells(record['verdicts'], outcomes)} |" for record in own]
        if not own:
            lines.append(f"| {link} | none stored: `make reproduce-{study.name}` |" + " |" * len(outcomes))
    return "\n".join(lines) + "\n"


def with_table(text: str, made: str) -> str:
    """Return README's text with this table between the two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + made + END + after


def _runs(record: Mapping[str, Any]) -> str:
    return f"`{record['scale']}`: {record['size'].partition(';')[0]} ({record['commit']})"


def _cells(verdicts: Mapping[str, str], outcomes: Sequence[str]) -> str:
    claims = [[claim for claim, verdict in verdicts.items() if verdict == outcome] for outcome in outcomes]
    return " | ".join(f"{len(names)}: {' '.join(names)}" if names else "0" for names in claims)


if __name__ == "__main__":
    main(sys.argv[1:])
