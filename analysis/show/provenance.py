"""Where a report's numbers come from: code, data, machine, time; and what of that is not as one would wish."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from fewbits import __version__
from fewbits.analysis.engine.alike import unlike_within_seeds
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.fingerprint import sources
from fewbits.analysis.show.markup import boxed, folded, listed, number, plural, tag, words
from fewbits.experiments.identity import computed_by_todays_sources, environments
from fewbits.experiments.storage.run_folder import HASH
from fewbits.sweeps.planning.cost import tokens_of, work_of
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.running import store

PACKAGES = ("torch", "numpy", "scipy", "pandas", "matplotlib")
SHOWN = 8  # flags of a kind, before the others are folded away


@dataclass(frozen=True)
class Provenance:
    results: Results
    sentence: Sequence[str]  # the words of the sweep
    changed: str = ""  # how the sweep's definition differs from that of the plan which is read

    @cached_property
    def over(self) -> list[tuple[Planned, dict[str, Any]]]:
        """Trials with a result, and where they come from."""
        trials = self.results.plan.trials.values()
        return [(one, one.folder.provenance() or {}) for one in trials if store.state(one.folder) in store.OVER]

    def values(self, key: str) -> Counter[str]:
        return Counter(str(made[key]) for _, made in self.over if made.get(key) is not None)

    @property
    def _same_sources(self) -> bool:
        return len({json.dumps(made.get("sources"), sort_keys=True) for _, made in self.over}) == 1

    @property
    def notices(self) -> list[str]:
        """Say where the results are not what today's code and definition would give, one line each."""
        other = [(one, made) for one, made in self.over if not computed_by_todays_sources(made)]
        if not other:
            return [self.changed] if self.changed else []
        commits = sorted({_short("git", str(made["git"])) for _, made in other if made.get("git")})
        named = f" (commit{'s' if len(commits) > 1 else ''} {', '.join(commits)})" if commits else ""
        trials, were = plural(len(self.over), "trial"), "was" if len(other) == 1 else "were"
        line = f"{len(other)} of {trials} {were} computed by code that differs from today's{named}"
        explain = f"`fewbits explain {other[0][0].id[:HASH]}` says in what"
        return [*([self.changed] if self.changed else []), f"{line}; {explain}"]

    @property
    def mixed(self) -> list[str]:
        """What the trials do not have in common, though they should, or what cannot be made again."""
        found = []
        for key, what in (("git", "commits"),):
            values = self.values(key)
            if len(values) > 1:
                each = ", ".join(f"{_short(key, value)} ({plural(count, 'trial')})" for value, count in values.items())
                same = "; their sources are the same" if key == "git" and self._same_sources else ""
                found.append(f"{len(values)} {what}: {each}{same}")
        if dirty := self.values("git_dirty")["True"]:
            found.append(f"{plural(dirty, 'trial')} computed from a working tree with uncommitted changes")
        return found + unlike_within_seeds(self.results.rows)

    def of_environments(self, key: str) -> str:
        """Return the values of one key of the environments that computed the trials."""
        values = {str(one[key]) for _, made in self.over for one in environments(made) if one.get(key) is not None}
        return words(", ".join(sorted(values)) or "unknown")

    def rows(self) -> Iterator[tuple[str, str]]:
        trials, members = self.results.plan.trials, self.results.members
        said = " ".join(_spelled(word) for word in self.sentence)
        yield "Made again by", tag("code", words(f"fewbits sweep {said}"))
        yield "", tag("code", words(f"fewbits report {said}"))
        sweeps = ", ".join(dict.fromkeys(member.cell.sweep for member in members))
        yield "Trials", words(f"{len(self.over)} of {len(trials)} over, in {len(members)} places of {sweeps}")
        yield "Seeds", words(", ".join(map(str, sorted({member.cell.seed for member in members}))))
        yield (
            "Models",
            words(f"{', '.join(sorted({t.trial.model.name for t in trials.values()}))}: {self.results.scale}"),
        )
        tokens, work = (sum(of(one.trial) for one, _ in self.over) for of in (tokens_of, work_of))
        yield "Training", words(f"{number(tokens)} tokens, {work:.2g} FLOPs of all trials together")
        made_of = next(iter(trials.values())).made_of
        yield "Fingerprint of the sources that compute", tag("code", made_of["numerics"][0][:16])
        yield "Sources of the analysis", tag("code", sources(("analysis",))[:16])
        for name, data in sorted({(one.trial.data.kind, one.made_of["data"]) for one in trials.values()}):
            yield f"Data: {name}", tag("code", data[:16])
        yield "Commits", _counted(self.values("git"), "git")
        yield "Kinds of machine", self.of_environments("kind")
        yield "Computed on", self.of_environments("processor")
        yield "Backend", self.of_environments("backend")
        yield "Torch of the trials", self.of_environments("torch")
        yield "fewbits", words(__version__)
        yield "Python of the trials", self.of_environments("python")
        yield "Packages now", words(", ".join(f"{name} {version(name)}" for name in PACKAGES))

    def table(self) -> str:
        rows = (tag("tr", tag("th", words(name), scope="row"), tag("td", text)) for name, text in self.rows())
        return boxed(tag("table", tag("tbody", *rows), class_="provenance"))

    def flags(self) -> str:
        """What a reader must know before any number; nothing where all is well."""
        parts = [tag("p", tag("b", "⚠ "), words(notice)) for notice in self.notices]
        if self.results.flags:
            count = len(self.results.flags)
            head = tag("p", tag("b", f"⚠ {plural(count, 'place')} of {len(self.results.members)} without a result"))
            shown, others = self.results.flags[:SHOWN], self.results.flags[SHOWN:]
            more = folded(f"{len(others)} more", listed(map(words, others))) if others else ""
            parts.append(head + listed(map(words, shown)) + more)
        if self.mixed:
            parts.append(tag("p", tag("b", "⚠ Not all of one making")) + listed(map(words, self.mixed)))
        if not parts:
            said = "All places have a result of today's code, and all results were made alike."
            return tag("p", f"✓ {said}", class_="flags fine")
        return tag("div", *parts, class_="flags")


def _spelled(word: str) -> str:
    """As one types it."""
    key, _, value = word.partition("=")
    if key != "runtime.runs":
        return shlex.quote(word)
    path = OverridesParser.create().parse_override(word).value() if value else ""
    return f"--runs {shlex.quote(str(path))}"


def _short(key: str, value: str) -> str:
    return value[:10] if key == "git" else value


def _counted(values: Counter[str], key: str) -> str:
    return words(", ".join(_short(key, value) for value in sorted(values)) or "unknown")
