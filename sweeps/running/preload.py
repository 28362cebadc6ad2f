"""Import the training code and compute the numerics fingerprint in the fork server, once for all local workers.

Ctrl-C also reaches the fork server and its workers, and so does a SIGTERM to the process group, for example of
`timeout`. They ignore both: the driver asks trials to stop.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)

import fewbits.sweeps.running.worker  # noqa: E402, F401
from fewbits.experiments.fingerprint.numerics import numerics_fingerprint  # noqa: E402

numerics_fingerprint("cpu")
