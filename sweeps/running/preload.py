"""Import the training code and compute the numerics fingerprint in the fork server, once for all local workers.

The garbage collector is off during the imports. Afterwards `gc.freeze` excludes the objects that exist, mostly those of
imported modules, which are never garbage. A search among them took a tenth of the time. In workers it would also write
to memory that they share with the fork server, so that the system would have to copy this memory.

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
