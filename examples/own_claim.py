"""Judge claims of your own about a sweep, as the studies' claims are judged: python own_claim.py [STORE].

conf/claims.yaml has the claims. Run own_recipe.py first: it trains the runs.
"""

import sys
from pathlib import Path

import fewbits

CONF = Path(__file__).parent / "conf"


def main(store: str = "runs") -> None:
    sweep = fewbits.read("sweep=thresholds", f"hydra.searchpath=[{CONF}]", runs=store)
    comparisons = sweep.judge(CONF / "claims.yaml")
    columns = ["claim", "verdict", "comparison", "effect", "low", "high", "n", "mde", "margin"]
    print(comparisons[columns].to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
