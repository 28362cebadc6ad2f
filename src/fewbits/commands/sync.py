"""Send to MLflow the data of a sweep's trials that MLflow does not have yet (`fewbits sync`)."""

from __future__ import annotations

from collections.abc import Sequence

from fewbits.commands.sweep import in_store
from fewbits.common.arguments import CommandParser, existing, warn_in_lines
from fewbits.common.redaction import redacted

EXAMPLES = """\
examples:
  fewbits sync study=mor scale=smoke
  fewbits sync my-sweep.yaml
  MLFLOW_TRACKING_URI=http://server:5000 fewbits sync study=mor scale=gpu     to another server

`fewbits sweep` also sends the data, while it runs. A repeated `fewbits sync` sends nothing twice.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits sync", __doc__, EXAMPLES)
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help="the sweep, as for `fewbits sweep`")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    options = parser.parse_args(argv)

    from fewbits.sweeps.planning.stored_plans import find_plan
    from fewbits.sweeps.tracking.links import link_lines
    from fewbits.sweeps.tracking.mlflow_view import Mirror

    warn_in_lines()
    plan = find_plan(in_store(options.overrides, existing(options.runs)))
    synced = Mirror(plan).sync(afresh=True)
    if synced.away:
        return 1
    print(f"{synced.sent} runs updated in {redacted(synced.uri)}")
    for line in link_lines(synced, plan.store):
        print(line)
    return 0
