"""Imported by the process that local workers are forked from: what each of them would load or compute anew.

Ctrl-C reaches that process and its workers too, but is the driver's, who asks trials for a stop.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)

import fewbits.sweeps.running.worker  # noqa: E402, F401
from fewbits.experiments.fingerprint.numerics import numerics_fingerprint  # noqa: E402

numerics_fingerprint("cpu")
