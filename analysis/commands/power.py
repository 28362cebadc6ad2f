"""Print, after `fewbits sweep --dry-run`, the minimum detectable effect of each of the study's claims."""

from __future__ import annotations

from collections.abc import Sequence

STUDY = "study="


def main(argv: Sequence[str]) -> int:
    """Print the minimum detectable effects with the planned seeds; print nothing if the study has no claims."""
    study = next((argument.removeprefix(STUDY) for argument in argv if argument.startswith(STUDY)), "")

    from fewbits.analysis.engine.claims import studies_with_claims

    if study not in studies_with_claims() or "--json" in argv:
        return 0
    from fewbits.analysis.engine.frames import Results
    from fewbits.analysis.engine.preview import preview, preview_lines
    from fewbits.sweeps.commands.sweep import in_store
    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.sweep import load_sweeps

    overrides = in_store([argument for argument in argv if "=" in argument and not argument.startswith("-")], None)
    print("\n" + "\n".join(preview_lines(preview(study, Results(plan(*load_sweeps(overrides)))))))
    return 0
