"""Run lm-eval's own command line, with the additional model type `fewbits`, which loads a finished run.

python -m fewbits.lm_eval run --model fewbits --model_args run=1a2b3c4d --tasks piqa
"""

from __future__ import annotations

import sys

from fewbits.common.process import extras
from fewbits.common.terminal import notice


def main() -> int:
    """Run lm-eval with the arguments of this process; print a ValueError, such as an unknown run, as one line."""
    try:
        with extras():
            from lm_eval.__main__ import cli_evaluate

            import fewbits.experiments.evaluation.language_model  # noqa: F401, registers the model type `fewbits`
        cli_evaluate()
    except ValueError as error:
        if sys.flags.dev_mode:
            raise
        notice(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
