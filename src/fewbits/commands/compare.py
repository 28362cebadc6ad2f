"""Compare the losses of runs, of a sweep's arms, or of other programs' logs (`fewbits compare`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import print_json, print_table

if TYPE_CHECKING:
    from fewbits.analysis.tidy.compare import Run

EXAMPLES = """\
examples:
  fewbits compare 1a2b3c4d 5e6f7a8b                        two runs of the store; the first is the baseline
  fewbits compare runs/*-bf16-* runs/*-nvfp4-*             several seeds of two recipes
  fewbits compare study=mor scale=smoke bf16 block         arms of a study; without names, all arms
  fewbits compare my-sweep.yaml                            the arms of your own sweep
  fewbits compare a=logs/a-seed1.csv a=logs/a-seed2.csv b=logs/b-seed1.csv b=logs/b-seed2.csv
  fewbits compare export.csv                               a CSV export of a W&B chart, with a column for each run
  fewbits compare base=tb/base mine=tb/mine --loss train/loss        folders of TensorBoard's event files

Runs that differ only in their seed are one arm. Seeds that two arms have in common are compared pair by pair. The seed
of a log is the number after `seed` or `s` in its name. The table and a figure are also written to the folder of --out.
"""
MOST_COLUMNS = 3  # arms whose settings fit into a terminal


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits compare", __doc__, EXAMPLES)
    words = "runs (folders, names, hashes), a sweep and its arms, or logs as [ARM=]PATH"
    parser.add_argument("words", nargs="+", metavar="RUN|ARM|LOG", help=words)
    parser.add_argument("--loss", metavar="NAME", help="the column or tag with the loss in logs")
    parser.add_argument(
        "--out", type=Path, default=Path("comparison"), help="the folder to write (default: comparison)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    parser.add_store()
    options = parser.parse_intermixed_args(argv)

    import pandas as pd

    from fewbits.analysis.figures.theme import png
    from fewbits.analysis.tidy import compare

    runs = _runs(options.words, options.runs, options.loss)
    comparison = compare.compare(runs)
    rows = [compare.texts(row) for row in comparison.rows]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "comparison.html").write_text(compare.page(comparison), "utf-8")
    (options.out / "comparison.png").write_bytes(png(compare.figure(comparison)))
    pd.DataFrame(rows, columns=list(compare.HEADER)).to_csv(options.out / "comparison.csv", index=False)
    if options.json:
        print_json([dict(zip(compare.HEADER, row, strict=True)) for row in rows])
        return 0
    print_table(compare.HEADER, rows, right=("loss", "difference", "p", "seeds for 0.01", "tokens/s"))
    print(f"\n{comparison.measure}; differences in nats, against {rows[0][0]}")
    for remark in comparison.remarks:
        print(remark)
    settings = comparison.settings
    if len(settings) and len(settings.columns) > MOST_COLUMNS:
        print(f"settings that differ, in comparison.html: {', '.join(settings.index)}")
    elif len(settings):
        print()
        cells = [(key, *map(str, values)) for key, values in zip(settings.index, settings.to_numpy(), strict=True)]
        print_table(("setting", *settings.columns), cells)
    print(f"\n{options.out / 'comparison.html'}")
    return 0


def _runs(words: Sequence[str], store: Path, loss: str | None) -> list[Run]:
    from fewbits.analysis.tidy.compare import of_folder, of_log
    from fewbits.experiments.storage.run_folder import find_run

    if words[0].startswith("study=") or words[0].endswith((".yaml", ".yml")):
        return _arms(words, store)
    found = []
    for word in words:
        arm, equals, path = word.partition("=")
        own, place = (arm, Path(path).expanduser()) if equals and not Path(word).exists() else (None, Path(word))
        if place.is_file() or (place.is_dir() and not (place / "provenance.json").is_file()):
            found += of_log(place, own, loss)
        elif equals and not place.exists() and "/" in path:
            raise ValueError(f"{word}: there is no file or folder {place}")
        else:
            found.append(of_folder(find_run(str(place), store), own))
    return found


def _arms(words: Sequence[str], store: Path) -> list[Run]:
    """Return the runs of a sweep's arms. words: the sweep and overrides, and names of arms (none: all arms)."""
    from fewbits.analysis.tidy.compare import of_folder
    from fewbits.analysis.tidy.runs import read
    from fewbits.common.from_dict import one_of

    first, *others = words
    overrides = [word for word in others if "=" in word]
    names = [word for word in others if "=" not in word]
    sweep = read(first.removeprefix("study="), *overrides, runs=store)
    trained = sweep.trials[[(Path(folder) / "metrics.parquet").is_file() for folder in sweep.trials["folder"]]]
    valid = list(dict.fromkeys(sweep.trials["arm"]))
    for name in names:
        one_of("arm", name, valid)
    if missing := [name for name in names if name not in {*trained["arm"]}]:
        raise ValueError(f"arm {missing[0]}: no run of it in {sweep.store} has losses yet; train it with fewbits sweep")
    trained = trained.drop_duplicates(["folder", "arm"])
    found = []
    parents = {Path(path).name for path in trained["branch.parent"].dropna()}
    trunks = {*trained["arm"][trained["run"].isin(parents)]}  # without names, arms are compared, not their trunks
    for name in names or [arm for arm in dict.fromkeys(trained["arm"]) if arm not in trunks]:
        rows = trained[trained["arm"] == name]
        several = [axis for axis in ("sweep", *sweep.axes) if rows[axis].astype(str).nunique() > 1]
        for row in rows.to_dict("records"):
            label = " ".join([name, *(str(row[axis]) for axis in several if row[axis] == row[axis])])
            found.append(of_folder(Path(row["folder"]), label))
    return found
