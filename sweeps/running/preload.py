"""Import the training code and compute the numerics fingerprint in the fork server, once for all local workers.

The garbage collector does not run meanwhile, and ignores afterwards what exists then: looking for garbage among the
objects of modules, which stay, took a tenth of the time, and in workers it would copy their memory.

Ctrl-C also reaches the fork server and its workers, and so does a SIGTERM to the process group, for example of
`timeout`. They ignore both: the driver asks trials to stop.
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
finally:  # a fork server ignores an import that fails
    gc.freeze()
    gc.enable()
