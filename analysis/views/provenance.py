"""Show the origin of a report's numbers (code, data, machines), and the warnings at the top of the report."""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fewbits.analysis.engine.claims.schema import pilots_of
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.rows import unlike_within_seeds
from fewbits.analysis.views.html import number, render
from fewbits.common.wording import plural
from fewbits.experiments.identity import label
from fewbits.experiments.storage.run_folder import HASH
from fewbits.models.recipe import EMULATE
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import tokens_of, work_of
from fewbits.sweeps.planning.plan import Planned
from fewbits.version import __version__

CODE = {".py", ".yaml", ".css", ".html"}
_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy", "scipy", "pandas", "matplotlib")


@dataclass(frozen=True)
class Provenance:
    """The origin of a study's results, read from the provenance.json of each run folder."""

    results: Results
    overrides: Sequence[str]  # the overrides that selected the sweeps

    @cached_property
    def finished(self) -> list[tuple[Planned, dict[str, Any]]]:
        """The pairs (trial, `Files.provenance`) of all trials that have a result."""
        over = {row["id"] for row in self.results.rows if row["state"] in store.OVER}
        trials = self.results.plan.trials
        return [(trials[key], self.results.files.provenance(trials[key])) for key in trials if key in over]

    def values(self, key: str) -> Counter[str]:
        """Return {value: number of trials} for one key of the trials' provenance.json."""
        return Counter(str(record[key]) for _, record in self.finished if record.get(key) is not None)

    @property
    def notices(self) -> list[str]:
        """Warnings that known results influenced the design (engine/claims/seeds.yaml), or that the code changed."""
        lines = []
        study, seeds = self.results.plan.sweeps[0].study, {member.cell.seed for member in self.results.members}
        if pilots := pilots_of(study, self.results.scale_name, sorted(seeds)):
            listed, reasons = ", ".join(map(str, pilots)), "; ".join(dict.fromkeys(pilots.values()))
            seen = f"this design was chosen after results of {plural(len(pilots), 'seed')} ({listed}) had been seen"
            lines.append(f"{seen}, so these verdicts are no independent test: {reasons}")
        if other := [(planned, record) for planned, record in self.finished if not record["current"]]:
            commits = sorted({str(record["git"])[:10] for _, record in other if record.get("git")})
            named = f" (commit{'s' if len(commits) > 1 else ''} {', '.join(commits)})" if commits else ""
            trials, were = plural(len(self.finished), "trial"), "was" if len(other) == 1 else "were"
            line = f"{len(other)} of {trials} {were} computed by code that differs from today's{named}"
            explain = f"to show the difference for one: `fewbits explain {other[0][0].id[:HASH]}`"
            lines.append(f"{line}; {explain}")
        return lines

    @property
    def mixed(self) -> list[str]:
        """Warnings about several commits, uncommitted code, and unlike environments within a seed or a trial."""
        lines, commits = [], self.values("git")
        if len(commits) > 1:
            each = ", ".join(f"{value[:10]} ({plural(count, 'trial')})" for value, count in commits.items())
            same = len({record["sources"] for _, record in self.finished}) == 1
            lines.append(f"{len(commits)} commits: {each}" + ("; their sources are the same" * same))
        if dirty := self.values("git_dirty")["True"]:
            were = "was" if dirty == 1 else "were"
            lines.append(f"{plural(dirty, 'trial')} {were} computed from a working tree with uncommitted changes")
        return lines + unlike_within_seeds(self.results.rows)

    def of_environments(self, key: str) -> str:
        """Return the different values of one key of the trials' environments (machine and software) as text."""
        records = (environment for _, record in self.finished for environment in record["environments"])
        values = {str(environment[key]) for environment in records if environment.get(key) is not None}
        return ", ".join(sorted(values)) or "unknown"

    def rows(self) -> Iterator[tuple[str, str, bool]]:
        """Yield (name, value, True to show the value as code): where the report's numbers come from."""
        trials, members = self.results.plan.trials, self.results.members
        overrides = shlex.join(self.overrides)
        commands, commits = [f"fewbits sweep {overrides}", f"fewbits report {overrides}"], list(self.values("git"))
        if len(commits) == 1:  # if there are several, none of them may plan all trials
            commands.insert(0, f"git checkout {commits[0][:10]}")
        for place, command in enumerate(commands):
            yield "Reproduce with" if place == 0 else "", command, True
        sweeps = ", ".join(dict.fromkeys(member.cell.sweep for member in members))
        yield "Trials", f"{len(self.finished)} of {len(trials)} finished, in {len(members)} places of {sweeps}", False
        yield "Seeds", ", ".join(map(str, sorted({member.cell.seed for member in members}))), False
        models = ", ".join(sorted({planned.trial.model.name for planned in trials.values()}))
        yield "Models", f"{models}: {self.results.scale}", False
        tokens, work = (sum(amount(done.trial) for done, _ in self.finished) for amount in (tokens_of, work_of))
        yield "Training", f"{number(tokens)} tokens and {work:.2g} FLOPs in all finished trials", False
        made_of = next(iter(trials.values())).made_of
        yield "Numerics version", label(made_of), False
        yield "Fingerprint of the analysis", _analysis_sources()[:16], True
        for name, data in sorted({(trial.trial.data.kind, trial.made_of["data"]) for trial in trials.values()}):
            yield f"Data: {name}", data[:16], True
        yield "Commits", ", ".join(value[:10] for value in sorted(self.values("git"))) or "unknown", False
        for name, key in (("Kinds of machine", "kind"), ("Computed on", "processor"), ("Backend", "backend")):
            yield name, self.of_environments(key), False
        if self.values("products").keys() - {EMULATE}:
            texts = (f"{plural(count, 'trial')} with execute: {how}" for how, count in self.values("products").items())
            yield "Products", ", ".join(texts), False
        yield "Torch of the trials", self.of_environments("torch"), False
        yield "fewbits", __version__, False
        yield "Python of the trials", self.of_environments("python"), False
        yield "Packages of the analysis", ", ".join(f"{name} {version(name)}" for name in PACKAGES), False

    def flags(self) -> Markup:
        """Return the warnings at the top of a report as HTML: missing results, changed code, different environments."""
        missing, places = self.results.flags, len(self.results.members)
        return render("flags", notices=self.notices, missing=missing, places=places, mixed=self.mixed)


def _analysis_sources() -> str:
    """Return one digest of the names and contents of the analysis's files whose suffix is in CODE."""
    total = hashlib.sha256()
    for path in sorted(path for path in (_ROOT / "analysis").rglob("*") if path.suffix in CODE):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(_ROOT).as_posix()} {digest}\n".encode())
    return total.hexdigest()
