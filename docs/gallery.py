"""Publish reports in docs/gallery, and write its table of verdicts from them, so that nobody types results by hand.

    make reproduce SCALE=cpu
    python docs/gallery.py reports/*-cpu

For each report folder, this copies the page to docs/gallery/STUDY-SCALE/index.html, and writes verdicts.json beside it
with the verdicts and the numbers from which they follow. Then it writes docs/gallery/index.md, the findings in the
README and the picture docs/effects.svg; without arguments, only these. A report with warnings is refused, for example
if it is incomplete or if another version of the code computed its trials.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.views.tables import view
from fewbits.common.atomic import write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.experiments.environment import commit
from fewbits.sweeps.planning.studies import STUDIES

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
README = ROOT / "README.md"
MARKERS = ("<!-- findings: written by docs/gallery.py -->\n", "<!-- end of findings -->\n")
# The claim of each study that the README shows, and those whose effects on the validation loss the picture shows.
FINDINGS = {"mor": "M3", "nvfp4": "N20", "gaussws": "G9", "primer": "C9"}
PICTURE = {"mor": ("M3", "M6", "M17", "M18"), "nvfp4": ("N4", "N22", "N23"), "gaussws": ("G8", "G13")}
NAMES = {"mor": "MoR", "nvfp4": "NVFP4", "gaussws": "GaussWS", "primer": "Primer"}
GREY = "#808080"  # is readable on white and on black
UNJUDGED = ("not run", "not testable here")
FOOT = (
    b'<a href="verdicts.json">verdicts.json</a> has the verdicts with their numbers. From '
    b'<a href="results.parquet">results.parquet</a>, <code>fewbits report --from results.parquet</code> makes this '
    b"page again, with the notebook, the tables and the figures as files."
)
LARGEST_PAGE = 2 * 2**20  # bytes
# The scales in the order of rows and columns of the tables.
SCALES = ("smoke", "cpu", "sizes", "pretrained", "cpu-full", "questions", "gpu", "paper")
HEAD = """\
# Gallery of reports

This page has a table for each study, with the verdict of each claim at each scale, and links to the published reports.
`fewbits report` wrote the reports; the commit at which a report was published is in parentheses, and
[studies](../measured/studies.md) has the commits of the runs. The number below a verdict is the effect, with its 90 %
interval, of the claim's comparison that has the weakest support (among those with an interval);
[read a verdict](../howto/verdict.md) explains both. Statements are today's; a page has the statements,
tests, controls and seeds of its commit. `docs/gallery.py` writes this file.
"""


def main(folders: Sequence[str]) -> None:
    for folder in map(Path, folders):
        publish(folder)
    published = records(GALLERY)
    write_atomically(GALLERY / "index.md", (HEAD + "\n" + by_scale(published)).encode())
    write_atomically(README, with_findings(README.read_text("utf-8"), published).encode())
    draw(effects(published), ROOT / "docs" / "effects.svg")


def publish(folder: Path) -> None:
    """Copy the page and verdicts of the report in `folder` to the gallery.

    Raise SystemExit if the folder is not a report's, the report has warnings, or its page is too large.
    """
    if not (folder / "verdicts.json").is_file():
        raise SystemExit(f"{folder}: no verdicts.json: pass folders of reports that `fewbits report` wrote")
    record = stored(json.loads((folder / "verdicts.json").read_text("utf-8")), str(folder))
    page = for_readers((folder / "index.html").read_bytes())
    if len(page) > LARGEST_PAGE:
        raise SystemExit(f"{folder}: the page has {len(page):,} bytes; at most {LARGEST_PAGE:,} are published")
    target = GALLERY / f"{record['study']}-{record['scale']}"
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / "index.html", page)
    if (folder / "results.parquet").is_file():
        write_atomically(target / "results.parquet", (folder / "results.parquet").read_bytes())
    write_atomically(target / "verdicts.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def for_readers(page: bytes) -> bytes:
    """Return a report's page, changed for readers who do not have the report's folder.

    FOOT replaces the sentence about files of the report's folder; other links to them are removed.
    """
    page = re.sub(rb"<footer><p>.*?</p>", b"<footer><p>" + FOOT + b"</p>", page, flags=re.DOTALL)
    return re.sub(rb'<(small|span|li) class="files">.*?</\1>', b"", page, flags=re.DOTALL)


def stored(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the content for the gallery's verdicts.json; raise SystemExit if the report has warnings.

    report: the content of the report's own verdicts.json. name: the report's folder, for the message.
    """
    if warnings := [*report["flags"], *report["notices"]]:
        raise SystemExit(f"{name}: not published; resolve its warnings ({len(warnings)}; the first: {warnings[0]})")
    kept = {key: report[key] for key in ("study", "scale", "size", "overrides")}
    claims = {claim: claim_record(restored(record)) for claim, record in report["claims"].items()}
    return {**kept, "commit": (commit() or "unknown")[:10], "claims": claims}


def restored(record: Mapping[str, Any]) -> Verdict:
    """Return the Verdict that a claim's record in a report's verdicts.json describes."""
    verdict = from_dict(Verdict, record)
    controls = (replace(control, findings=_restored(control.findings)) for control in verdict.controls)
    findings = _restored(verdict.findings)
    return replace(verdict, outcome=Outcome(verdict.outcome), findings=findings, controls=tuple(controls))


def _restored(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(replace(finding, status=Status(finding.status)) for finding in findings)


def claim_record(verdict: Verdict) -> dict[str, Any]:
    """Return the record of a claim in the gallery's verdicts.json."""
    claim = verdict.claim
    controls = {one.id: "passed" if one.passed else "failed" if one.tested else "not run" for one in verdict.controls}
    leading = verdict.leading
    return {
        "verdict": verdict.outcome,
        "reason": verdict.reason,
        "statement": claim.statement,
        "kind": claim.kind,
        "judged_at": claim.judged_at,
        "scale": verdict.scale,
        "controls": controls,
        "notes": list(verdict.notes),
        "shown": _shown(leading) if leading and verdict.outcome is not Outcome.NOT_TESTABLE else "",
        "parts": [_part(finding) for finding in verdict.findings],
    }


def _part(finding: Finding) -> dict[str, Any]:
    interval = finding.interval
    return {
        "name": finding.heading,
        "status": finding.status,
        "shown": _shown(finding),
        "printed": view(finding).paper,
        "effect": finding.effect,
        "interval": interval and [interval.low, interval.high, interval.level],
        "repeats": finding.n,
        "extra_tokens": finding.extra_tokens,
        "margin": finding.margin,
        "bound": finding.bound,
        "relative": finding.relative,
    }


def _shown(finding: Finding) -> str:
    shown = view(finding)
    return f"{shown.effect} {shown.bounds}".strip()


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of all verdicts.json in the gallery, sorted by study and then by scale."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("*/verdicts.json")]
    studies = list(STUDIES)
    return sorted(found, key=lambda record: (studies.index(record["study"]), SCALES.index(record["scale"])))


def by_scale(published: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown section for each study, with a row for each claim and a column for each published scale.

    A cell has the claim's verdict and effect at that scale.
    """
    rows, sections = list(published), []
    for study in STUDIES.values():
        own = [record for record in rows if record["study"] == study.name]
        lines = [f"## {study.title}", ""]
        lines += [f"- {_runs(record)}{_changed(record)}" for record in own] or ["No report is published."]
        claims = load_claims(study.name).claims if own else ()
        if claims:
            heads = ["claim", *(record["scale"] for record in own), "statement"]
            lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for claim in claims:
            cells = [_verdict(record["claims"].get(claim.id)) for record in own]
            statement = claim.statement.replace("|", r"\|")
            lines.append(f"| {' | '.join([claim.id, *cells, statement])} |")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _verdict(claim: Mapping[str, Any] | None) -> str:
    if claim is None:
        return "–"
    return f"{claim['verdict']}<br>{claim['shown']}" if claim["shown"] else claim["verdict"]


def _runs(record: Mapping[str, Any]) -> str:
    page = f"{record['study']}-{record['scale']}/index.html"
    return f"[`{record['scale']}`]({page}): {record['size'].partition(';')[0]} ({record['commit']})"


def _changed(record: Mapping[str, Any]) -> str:
    """Return the overrides of the report's command except study, scale and store, as text that begins with `, with`.

    Return an empty text if there are no such overrides.
    """
    changed = [text for text in record["overrides"] if text.partition("=")[0] not in ("study", "scale", "runs")]
    return f", with {', '.join(f'`{text}`' for text in changed)}" if changed else ""


# ------------------------------------------------------------------------------------------------ the README


def with_findings(text: str, published: Iterable[Mapping[str, Any]]) -> str:
    """Return the README with one finding for each study between its markers."""
    before, _, rest = text.partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    rows, lines = list(published), []
    for study, claim in FINDINGS.items():
        record = _record_of(rows, study, claim)
        if record is not None:
            found = record["claims"][claim]
            shown = f", {found['shown']}" if found["shown"] else ""
            page = f"docs/gallery/{study}-{record['scale']}/index.html"
            size = record["size"].partition(";")[0]
            head = f"- **{NAMES[study]}** ([{size}]({page})):"
            lines.append(f"{head} “{found['statement'].rstrip('.')}”: *{found['verdict']}*{shown}.\n")
    return before + MARKERS[0] + "".join(lines) + MARKERS[1] + after


def _record_of(rows: Iterable[Mapping[str, Any]], study: str, claim: str) -> Mapping[str, Any] | None:
    """Return the record at the claim's own scale, else that with the most seeds; None if nothing judged the claim."""
    judged = [
        record
        for record in rows
        if record["study"] == study and record["claims"].get(claim, {}).get("verdict", "not run") not in UNJUDGED
    ]

    def rank(record: Mapping[str, Any]) -> tuple[bool, int]:
        found = record["claims"][claim]
        return record["scale"] == found["judged_at"], max(part["repeats"] for part in found["parts"])

    return max(judged, key=rank, default=None)


def effects(published: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, float, float, float]]:
    """Return study, claim with comparison, effect and interval (percent of the loss) of the picture's comparisons."""
    rows, found = list(published), {}
    for study, claims in PICTURE.items():
        for claim in claims:
            record = _record_of(rows, study, claim)
            for part in record["claims"][claim]["parts"] if record else ():
                loss = re.fullmatch(r"(.*), (?:validation|training) loss(?:, configuration 1)?", part["name"])
                if not loss or not part["relative"] or not part["interval"]:
                    continue
                name = re.sub(r" (?:like|above|below|no worse than) ", " against ", loss[1])
                if len(name) <= 40 and not name.endswith("largest") and (study, claim, name) not in found:
                    low, high, _ = part["interval"]
                    found[study, claim, name] = tuple(100 * value for value in (part["effect"], low, high))
    return [(study, f"{claim}, {name}", *numbers) for (study, claim, name), numbers in found.items()]


def draw(rows: Sequence[tuple[str, str, float, float, float]], path: Path) -> None:
    """Draw effects on the loss with their intervals, for light and dark pages."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    looks = {"svg.hashsalt": "fewbits", "font.size": 9, "text.color": GREY, "axes.labelcolor": GREY}
    with plt.rc_context({**looks, "xtick.color": GREY, "ytick.color": GREY, "axes.edgecolor": GREY}):
        figure, axes = plt.subplots(figsize=(8, 0.23 * len(rows) + 0.8), layout="constrained")
        for y, (study, _, effect, low, high) in enumerate(rows):
            color = f"C{list(PICTURE).index(study)}"
            axes.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
            axes.plot(effect, y, "o", color=color, markersize=5)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [f"{NAMES[row[0]]} {row[1]}" for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("difference of the final loss, %, with 90 % interval")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
