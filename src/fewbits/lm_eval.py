"""Run lm-eval's command line with the model `fewbits`, a finished run, as lm-eval documents it for external models.

python -m fewbits.lm_eval run --model fewbits --model_args run=1a2b3c4d --tasks piqa
"""

from __future__ import annotations

import sys

from fewbits.common.terminal import notice


def main() -> int:
    """Run lm-eval with the arguments of this process; a ValueError, such as that of an unknown run, is one line."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as missing:
        if missing.name != "lm_eval":
            raise
        notice("lm-eval is not installed: pip install 'fewbits[eval]'")
        return 2
    import fewbits.experiments.evaluation.lm_eval_model  # noqa: F401, registers the model

    try:
        cli_evaluate()
    except ValueError as error:
        if sys.flags.dev_mode:
            raise
        notice(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
