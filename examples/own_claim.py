"""Check your own claims about a sweep with the statistics of the studies' claims: python own_claim.py [STORE].

The claims are in conf/claims.yaml. Run own_recipe.py first: it trains the sweep's trials in the store.
"""

import sys
from pathlib import Path

import fewbits

CONF = Path(__file__).parent / "conf"


def main(store: str = "runs") -> None:
    sweep = fewbits.read("sweep=thresholds", f"hydra.searchpath=[{CONF}]", runs=store)
    comparisons = sweep.judge(CONF / "claims.yaml")
    columns = ["claim", "verdict", "comparison", "effect", "low", "high", "n", "margin"]
    print(comparisons[columns].to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
