"""Train your own recipe with several thresholds, and compare the runs: python own_recipe.py [STORE].

The recipe is conf/recipe/mine.yaml; the sweep file is conf/sweep/thresholds.yaml. The same with commands:

    fewbits sweep sweep=thresholds --config-dir conf
    fewbits ui
"""

import subprocess
import sys
from pathlib import Path

import mlflow

import fewbits

CONF = Path(__file__).parent / "conf"


def main(store: str = "runs") -> None:
    command = ["sweep", "sweep=thresholds", "--config-dir", str(CONF), "--runs", store, "--backend", "local"]
    subprocess.run([sys.executable, "-m", "fewbits.cli", *command], check=True)

    # Compare the trials in Python: `sweep.trials` is a DataFrame with a row for each trial
    sweep = fewbits.read("sweep=thresholds", f"hydra.searchpath=[{CONF}]", runs=store)
    print(sweep.trials.groupby(["arm", "recipe.threshold"], dropna=False)["validation_loss"].agg(["mean", "std"]))

    # Compare the arms, which are means over seeds, in MLflow; `fewbits ui` shows the same runs in a browser
    mlflow.set_tracking_uri(f"sqlite:///{Path(store).resolve() / 'mlflow.db'}")
    runs = mlflow.search_runs(
        experiment_names=["thresholds"], filter_string="tags.`fewbits.kind` = 'arm' and params.arm = 'mine'"
    )
    print(runs[["params.recipe.threshold", "metrics.seeds", "metrics.loss/validation_loss"]].to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
