"""Measure how busy a sweep keeps the machine's cores, and the time it adds to each training (`fewbits bench sweep`)."""

from __future__ import annotations

from collections.abc import Sequence

from fewbits.common.arguments import CommandParser, positive

EXAMPLES = """\
examples:
  fewbits bench sweep                              20 trials of about 30 s, on Ray: about five minutes on two cores
  fewbits bench sweep --trials 8 --seconds 5 --backend local

Run it on a machine that does nothing else: work of other programs counts as work of the sweep.
"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits bench sweep", __doc__, EXAMPLES)
    parser.add_argument("--trials", type=positive, default=20, help="trials of the sweep (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of training in each trial (default: 30)")
    parser.add_argument(
        "--backend", choices=("ray", "local"), default="ray", help="what runs the trials (default: %(default)s)"
    )
    options = parser.parse_args(argv)

    from fewbits.commands.sweep_benchmark import measure

    measure(options.trials, options.seconds, options.backend)
    return 0
