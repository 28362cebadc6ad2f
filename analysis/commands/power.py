"""After `fewbits sweep --dry-run`: print what the planned seeds can tell of each claim of the study."""

from __future__ import annotations

from collections.abc import Sequence

WORD = "study="


def main(argv: Sequence[str]) -> int:
    """Print the minimum detectable effects of a study's plan; nothing for a sweep of the user's own."""
    study = next((word.removeprefix(WORD) for word in argv if word.startswith(WORD)), "")

    from fewbits.analysis.engine.claims import studies_with_claims

    if study not in studies_with_claims() or "--json" in argv:
        return 0
    from fewbits.analysis.engine.frames import Results
    from fewbits.analysis.engine.preview import preview, preview_lines
    from fewbits.sweeps.commands.sweep import in_store
    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.sweep import load_sweeps

    words = in_store([word for word in argv if "=" in word and not word.startswith("-")], None)
    print("\n" + "\n".join(preview_lines(preview(study, Results(plan(*load_sweeps(words)))))))
    return 0
