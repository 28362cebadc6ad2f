"""List the studies and their recipes (`fewbits studies`)."""

import dataclasses
import json
from collections.abc import Sequence

from fewbits.common.arguments import CommandParser
from fewbits.sweeps.planning.studies import STUDIES, Study


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "fewbits studies",
        about="List the studies (the papers and texts that fewbits reproduces) with the recipes that they compare. A "
        "recipe can also be trained alone, with `fewbits train recipe=NAME`; `make reproduce-mor` runs all sweeps of "
        "the study mor and writes its report.",
        examples="example: fewbits studies --json",
    )
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    options = parser.parse_args(argv)
    if options.json:
        studies = [{**dataclasses.asdict(study), "recipes": study.recipes} for study in STUDIES.values()]
        print(json.dumps(studies, indent=2))
    else:
        print("\n\n".join(map(_entry, STUDIES.values())))
    return 0


def _entry(study: Study) -> str:
    title = f"{study.title} (arXiv {study.arxiv})" if study.arxiv else study.title
    return "\n  ".join([study.name, title, study.about, f"recipes {', '.join(study.recipes)}"])
