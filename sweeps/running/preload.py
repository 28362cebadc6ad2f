"""Import the training code and compute the numerics fingerprint in the fork server, once for all local workers.

The garbage collector is off meanwhile, and `gc.freeze` then excludes the objects that exist: the imported modules. They
are never garbage. To search them took a tenth of the time, and in workers the search would write to memory that they
share with the fork server, which would copy it.

Ctrl-C also reaches the fork server and its workers, and so does a SIGTERM to the process group, for example from the
command `timeout`. They ignore both signals, since the driver asks trials to stop.
"""

import gc
import signal

gc.disable()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)

try:
    import fewbits.sweeps.running.worker  # noqa: F401
    from fewbits.experiments.fingerprint.numerics import numerics_fingerprint

    numerics_fingerprint("cpu")
finally:  # the collector has to run again even if the import fails, since a fork server ignores failed imports
    gc.freeze()
    gc.enable()
