"""Print the minimum detectable effects of a study's claims; `fewbits sweep --dry-run` runs this at its end."""

from __future__ import annotations

from collections.abc import Sequence

STUDY = "study="


def main(argv: Sequence[str]) -> int:
    """Print for each claim of a study the smallest effect that the planned seeds can detect, and return 0.

    If trials of this scale cannot test the claims, print the reason instead. Print nothing if the sweep does not belong
    to a study with claims. argv: the arguments of `fewbits sweep`.
    """
    from fewbits.commands.sweep import overrides_of, parse

    options = parse(argv)
    study = next((text.removeprefix(STUDY) for text in options.overrides if text.startswith(STUDY)), "")

    from fewbits.analysis.engine.claims.schema import load_claims, studies_with_claims

    if study not in studies_with_claims():
        return 0
    from fewbits.analysis.engine.claims.preview import preview, preview_lines
    from fewbits.analysis.engine.results.frames import Results
    from fewbits.sweeps.dry_run.outline import plan_or_outline

    planned = plan_or_outline(overrides_of(options))
    results = Results(planned)
    if reason := load_claims(study).unfit.get(results.scale_name):
        print(f"\nthis scale decides only claims that need no trials: {reason}")
    else:
        print("\n" + "\n".join(preview_lines(preview(study, results))))
    return 0
