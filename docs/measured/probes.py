"""Print the results of a study's probes as a Markdown table: a row for each arm and checkpoint, averaged over seeds.

python docs/measured/probes.py nvfp4 --scale pretrained --runs STORE
python docs/measured/probes.py mor --scale sizes --sweep ladder --runs STORE
"""

import argparse

from fewbits import read

COLUMNS = ("probe", "at", "seeds", "increase of the loss, %", "lowest and highest seed", "error of the gradient, %")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a table of a study's probes.")
    parser.add_argument("study")
    parser.add_argument("--scale", default="pretrained")
    parser.add_argument("--sweep", default="probes")
    parser.add_argument("--runs", default="runs")
    chosen = parser.parse_args()
    trials = read(chosen.study, scale=chosen.scale, runs=chosen.runs).trials
    done = trials[(trials["sweep"] == chosen.sweep) & (trials["state"] == "done") & trials["increase"].notna()]
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for (arm, checkpoint), rows in done.groupby(["arm", "checkpoint"], sort=False):
        increase, error = 100 * rows["increase_relative"], 100 * rows["gradient_error"].mean()
        span = f"{increase.min():+.2f} to {increase.max():+.2f}"
        name = arm.removeprefix("probe-").removeprefix("ladder-")
        print(f"| {name} | {checkpoint} | {len(rows)} | {increase.mean():+.2f} | {span} | {error:.1f} |")


if __name__ == "__main__":
    main()
