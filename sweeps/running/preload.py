"""Prepare the fork server for local workers: import the training code, and hash the sources that compute results.

Workers are forked from this process afterwards, so that they do not have to repeat either.

The garbage collector is off during the imports, because it took a tenth of their time. Afterwards `gc.freeze` excludes
all existing objects from its searches: most belong to imported modules and are never garbage. In workers, such a search
would also write to the memory of these objects, which is shared with the fork server, so the system would copy it.

Ctrl-C also reaches the fork server and its workers, and so does a SIGTERM to the process group, for example from the
command `timeout`. They ignore both signals: the driver, which also gets them, asks the trials to stop.
"""

import gc
import signal

gc.disable()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)

try:
    import fewbits.sweeps.running.worker  # noqa: F401
    from fewbits.experiments.identity import running

    running()
finally:  # the collector has to run again even if the import fails, since a fork server ignores failed imports
    gc.freeze()
    gc.enable()
