"""Run a grid of trials as one sweep (`fewbits train --multirun`): Hydra chooses the trials, fewbits runs them.

Hydra's own sweeper runs all combinations of `key=a,b`, `key=range(…)` and `key=choice(…)`. `hydra/sweeper=NAME` selects
another installed sweeper, for example Optuna's, which gets the validation loss of each trial (infinity if it diverged).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fewbits.commands.hydra_options import add_hydra_options
from fewbits.commands.sweep import add_where
from fewbits.common.arguments import CommandParser

EXAMPLES = """\
examples:
  fewbits train -m recipe=mor/block recipe.threshold=0.03,0.045 seed=0,1
  fewbits train -m 'training.steps=range(10,50,10)' hydra.job.name=lengths    named, for `fewbits status lengths`
  fewbits train -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(1e-4,1e-2))' hydra.sweeper.n_trials=20

After an interruption, the same command runs the remaining trials; `fewbits status` lists the multiruns of a store.
"""
FLAGS = ("-m", "--multirun")


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits train --multirun", __doc__, EXAMPLES)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="a setting, KEY=VALUE, or KEY=A,B for several values"
    )
    parser.add_argument(*FLAGS, action="store_true", help=argparse.SUPPRESS)
    add_where(parser)
    add_hydra_options(parser)
    options = parser.parse_intermixed_args(argv)

    from fewbits.commands.multirun_jobs import run_multirun

    return run_multirun(options)
