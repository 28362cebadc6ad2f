"""Write docs/findings.md from the reports that are published in docs/gallery, so that nobody types a number.

    python docs/findings.py

findings.yaml has the sentences, with names of claims in place of numbers. A claim has its label on the scale that
claims.yaml names (`judged_at`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from gallery import GALLERY, NAMES, records

from fewbits.analysis.engine.claims.findings import Outcome, Status
from fewbits.analysis.engine.claims.schema import Claim, Kind, StudyClaims, comparisons, load_claims
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import arm_table
from fewbits.common.atomic import write_atomically
from fewbits.common.wording import plural

DOCS = Path(__file__).parent
SENTENCES = DOCS / "findings.yaml"
PLACE = re.compile(r"\{(\w+)(?:: ([^}]+))?\}")  # {CLAIM} or {CLAIM: HEADING OF A COMPARISON}


@dataclass(frozen=True)
class Judged:
    """A claim with its label, and with the numbers of one part, which another scale may have if its own has not run."""

    claim: Claim
    label: str
    scale: str = ""  # of the numbers
    parts: tuple[Mapping[str, Any], ...] = ()  # those with numbers, as in the gallery's verdicts.json

    @property
    def leading(self) -> Mapping[str, Any] | None:
        """The part that stands beside the paper's number; without one, the first that has an interval."""
        ranks = ((bool(part["printed"]), part["interval"] is not None) for part in self.parts)
        return max(zip(ranks, self.parts, strict=True), key=lambda pair: pair[0], default=(None, None))[1]


def main() -> None:
    write_atomically(DOCS / "findings.md", findings(records(GALLERY)).encode())


def empirical(study: str) -> StudyClaims:
    """Return the claims of a study that need runs."""
    of = load_claims(study)
    return replace(of, claims=tuple(claim for claim in of.claims if claim.kind is not Kind.ARITHMETIC))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "".join(f"|{'|'.join(map(str, row))}|\n" for row in (heads, ["---"] * len(heads), *rows))


def with_numbers(claim: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a claim's record that were tested and have an effect."""
    untested = (Status.NOT_RUN, Status.NOT_TESTABLE)
    return [part for part in claim["parts"] if part["effect"] is not None and part["status"] not in untested]


def findings(sources: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of findings.

    sources: records of published reports; the first with a claim's own scale gives the claim's label.
    """
    texts: Mapping[str, Any] = yaml.safe_load(SENTENCES.read_text("utf-8"))
    parts, rows = [texts["head"]], []
    for study, name in NAMES.items():
        judged = {claim.id: judge(study, claim, sources) for claim in empirical(study).claims}
        sentences = (filled(study, sentence, judged) for sentence in texts["studies"][study])
        parts.append(f"**{name}.** {' '.join([counts(judged.values()), *filter(None, sentences)])}\n")
        rows += [row for one in judged.values() if (row := effect_row(study, one))]
    heads = ("claim", "comparison", "paper", "here, 90 % interval", "seeds", "scale", "label")
    parts.append(f"## Effects beside the papers' numbers\n\n{table(heads, rows)}")
    return "\n".join([*parts, texts["foot"]])


def judge(study: str, claim: Claim, sources: Iterable[Mapping[str, Any]]) -> Judged:
    """Return the claim with its label on its own scale, and with numbers of this scale or, without them, of another."""
    found = {}
    for source in sources:
        record = source["claims"].get(claim.id, {}) if source["study"] == study else {}
        if record and record["verdict"] != Outcome.NOT_RUN:
            found.setdefault(source["scale"], record)
    if own := found.get(claim.judged_at):
        return Judged(claim, own["verdict"], claim.judged_at, tuple(with_numbers(own)))
    scale, parts = next(((scale, parts) for scale, one in found.items() if (parts := with_numbers(one))), ("", []))
    return Judged(claim, Outcome.NOT_RUN, scale, tuple(parts))


def counts(judged: Iterable[Judged]) -> str:
    """Return a sentence with the claims of the paper and of ours that have each label."""
    judged, texts = list(judged), []
    for ours, what in ((False, "The paper's"), (True, "Our")):
        ids = {
            label: [one.claim.id for one in judged if one.claim.ours is ours and one.label == label]
            for label in Outcome
        }
        if total := sum(map(len, ids.values())):
            each = (f"{len(some)} {label} ({', '.join(some)})" for label, some in ids.items() if some)
            texts.append(f"{what} {plural(total, 'claim')}: {'; '.join(each)}.")
    return " ".join(texts)


def filled(study: str, sentence: str, judged: Mapping[str, Judged]) -> str:
    """Return the sentence with numbers in the places of claims; "" if one of them has no number.

    Raise ValueError if it names a claim or comparison that the study does not have.
    """
    texts: dict[str, str] = {}
    for place in PLACE.finditer(sentence):
        name, heading = place.groups()
        if name not in judged or (
            heading and heading not in [one.title for one in comparisons(judged[name].claim, arm_table(study))]
        ):
            raise ValueError(f"{SENTENCES.name}: {place[0]} is no comparison of a claim of {study}")
        one = judged[name]
        part = one.leading if not heading else next((part for part in one.parts if part["name"] == heading), None)
        if part is None:
            return ""
        at = "" if one.scale == one.claim.judged_at else f" at scale {one.scale}"
        texts[place[0]] = f"{part['shown']}{at} ({name}: {one.label})"
    return PLACE.sub(lambda place: texts[place[0]], sentence)


def effect_row(study: str, one: Judged) -> tuple[object, ...] | None:
    """Return the row of a main claim or one with a number of the paper; None for other claims and without effects."""
    part = one.leading
    if part is None or not (one.claim.id in paper(study).primary or any(own.printed for own in one.claim.parts)):
        return None
    name = f"{NAMES[study]} {one.claim.id}"
    return name, part["name"], part["printed"], part["shown"], part["repeats"], one.scale, one.label


if __name__ == "__main__":
    main()
