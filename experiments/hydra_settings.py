"""Explain, for each of Hydra's own settings that fewbits does not use, what to use instead."""

from __future__ import annotations

import re

_STORE = "results are in the store: runtime.runs=DIR chooses another store"
_MULTIRUN = "only `fewbits train --multirun` uses it"
_LAUNCHER = (
    "fewbits itself runs the trials, through Ray on all cores; --backend local runs them without Ray, --parallel N at "
    "most N at a time, and --address A on a Ray cluster"
)
_LOGS = "`fewbits train … 2>FILE` stores a trial's output; for a trial of a sweep, `fewbits logs RUN` prints the output"
_INSTEAD = {  # what to use instead, by the beginning of the setting's path
    "mode": "--multirun runs several trials, and a command without it runs one",
    "run": _STORE,
    "sweep": _STORE,
    "output_subdir": _STORE,
    "runtime": _STORE,
    "launcher": _LAUNCHER,
    "sweeper": _MULTIRUN,
    "job.name": _MULTIRUN,
    "callbacks": _MULTIRUN,
    "job.chdir": f"a trial never changes the working directory; {_STORE}",
    "job.env_set": "set variables before the command: NAME=VALUE fewbits train …; --env NAME passes one to workers",
    "job.env_copy": "workers on this machine inherit all variables; --env NAME passes one to workers of a cluster",
    "verbose": "`python -X dev -m fewbits.cli train …` shows the traceback of an error",
    "job_logging": _LOGS,
    "hydra_logging": _LOGS,
    "help": "`fewbits train --help` prints the help of this command",
}
_NO_EFFECT = f"this setting of Hydra's has no effect on trials: leave it out; {_STORE}"
_OF_MULTIRUN = ("mode", "sweeper", "job.name", "callbacks", "searchpath")  # settings that a multirun uses


def is_hydra_setting(key: str) -> bool:
    """Tell whether an override's key is one of Hydra's own settings, such as `hydra.run.dir` or `hydra/launcher`."""
    return re.match(r"[+~]*hydra\b", key) is not None


def explain_setting(key: str, multirun: bool = False) -> str | None:
    """Return a message which says that fewbits does not use this setting of Hydra's, and what to use instead.

    key: the key of an override of one of Hydra's own settings, such as `hydra.run.dir`. multirun: whether the command
    is a multirun. A multirun uses some of Hydra's settings, such as `hydra/sweeper`; for these, None is returned.
    """
    path = re.sub(r"^[+~]*hydra[./]?", "", key).replace("/", ".")
    matching = (start for start in (*_INSTEAD, *_OF_MULTIRUN) if path == start or path.startswith(f"{start}."))
    start = next(matching, "")
    if multirun and start in _OF_MULTIRUN:
        return None
    instead = _INSTEAD.get(start, _NO_EFFECT)
    return f"{key} is not used: {instead}"
