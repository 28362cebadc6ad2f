"""Write the site's generated pages: docs/reference from the code, docs/project from the texts beside the code."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import fewbits
from fewbits.analysis.engine.claims.schema import Claim, Kind, Margin, Needs, Part, load_claims, studies_with_claims
from fewbits.analysis.engine.results.paper import paper
from fewbits.cli import GROUPS, main
from fewbits.commands.list import GROUPS as LISTS
from fewbits.common.wording import amount
from fewbits.kernels.formats import TABLE
from fewbits.kernels.scalings import SCALINGS

ROOT = Path(__file__).parents[1]
# Texts beside the code that are pages of the site: the page's name → the file.
PROJECT = {
    "project/contributing": "CONTRIBUTING.md",
    "project/changelog": "CHANGELOG.md",
    "project/security": "SECURITY.md",
    "project/deploy": "infra/README.md",
    "project/examples": "examples/README.md",
    "project/kernels": "kernels/README.md",
    "project/models": "models/README.md",
    "project/experiments": "experiments/README.md",
    "project/sweeps": "sweeps/README.md",
    "project/analysis": "analysis/README.md",
}
FENCES = re.compile(r"(^```.*?^```|^:::.*?$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)")


def write(root: Path) -> None:
    """Write all generated pages; a page whose text is the same is left alone, so that Sphinx does not read it again."""
    os.environ["COLUMNS"] = "100"
    texts = {f"reference/{name}": make() for name, make in REFERENCE.items()}
    for name, file in PROJECT.items():
        text = (root / file).read_text("utf-8")
        texts[name] = site_links(text, root / file, name)
    for folder in ("reference", "project"):
        for old in (root / "docs" / folder).glob("*.md"):
            if f"{folder}/{old.stem}" not in texts:
                old.unlink()
    for name, text in texts.items():
        path = root / "docs" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def site_links(text: str, file: Path, page: str) -> str:
    """Return Markdown with links that work on the site.

    A link to a text that is a page of the site leads to this page; one to a published report to its copy. One to
    another file of the repository becomes the file's path, because the site has no copy of the sources.
    """
    pages = {(ROOT / source).resolve(): name for name, source in PROJECT.items()}

    def change(match: re.Match[str]) -> str:
        label, path, anchor = match[1], match[2], match[3] or ""
        if not path:
            return match[0]
        target = (file.parent / path).resolve()
        if target in pages:
            relative = os.path.relpath(f"{pages[target]}.md", Path(page).parent)
            return f"[{label}]({relative}{anchor})"
        if target.is_relative_to(ROOT / "docs"):
            name = target.relative_to(ROOT / "docs")
            relative = os.path.relpath(name, Path(page).parent)
            return f'<a href="{relative}">{label}</a>' if target.suffix == ".html" else f"[{label}]({relative}{anchor})"
        if not target.exists():
            raise FileNotFoundError(f"{file}: the link to {path} leads nowhere")
        shown = f"`{target.relative_to(ROOT)}`"
        return label if label.strip("`") in shown else f"{label} ({shown})"

    parts = FENCES.split(text)
    return "".join(part if index % 2 else LINK.sub(change, part) for index, part in enumerate(parts))


# ------------------------------------------------------------------------------------------------ generated from code


def _printed(*argv: str) -> str:
    """Return what `fewbits ARGV` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(argv)
    return out.getvalue().strip()


def _block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"


def commands() -> str:
    parts = ["# Command line", "`fewbits COMMAND --help` prints these texts."]
    for group, members in GROUPS.items():
        parts.append(f"## {group}")
        for command in members:
            parts += [f"### fewbits {command.name}", _block(_printed(*command.words, "--help"))]
    return "\n\n".join(parts) + "\n"


def listing(group: str) -> Callable[[], str]:
    """Return a function that makes the page of `fewbits list GROUP`, with a heading for each name."""

    def make() -> str:
        parts = [
            f"# {group.capitalize()}",
            f"`fewbits list {group}` prints this, `fewbits list {group} NAME` the settings.",
        ]
        if group == "recipes" and (ROOT / "docs" / "atlas" / "index.html").is_file():
            parts.append(
                "[The atlas](../atlas/index.html) has a picture and a table of what all of them change and cost."
            )
        text = _printed("list", group)
        if group in ("recipes", "studies"):
            for entry in text.split("\n\n"):
                name, _, rest = entry.partition("\n")
                parts += [f"## {name}", _block(inspect.cleandoc(f"\n{rest}"))]
        else:
            parts.append(_block(text))
        return "\n\n".join(parts) + "\n"

    return make


def _table(heads: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [[str("" if cell is None else cell).replace("|", "\\|").strip() for cell in line] for line in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ("---",) * len(heads), *lines])


def scalings() -> str:
    rows = (
        (
            f"`{one.name}`",
            one.kind,
            one.stored,
            one.rounding if one.stored else "",
            ", ".join(one.groups),
            f"{one.target:g}" if one.target else "",
            f"{one.top:.4g}" if one.top else "",
            f"{one.expansion:g}" if one.compares else "",
            "; ".join(
                ", ".join(map(str, valid))
                for valid in (one.formats, one.blocks, one.roundings, tuple(f"rht{n}" for n in one.hadamards))
                if valid
            ),
        )
        for one in SCALINGS.values()
    )
    heads = ("scaling", "kind", "stored in", "rounding", "groups", "target", "top", "expansion", "only with")
    note = "The records of `kernels/scalings.py`; [arithmetic](../arithmetic.md#blocks-and-scales) defines the columns."
    return f"# Scalings\n\n{note}\n\n{_table(heads, rows)}\n"


def formats() -> str:
    rows = (
        (f"`{name}`", one.bits, f"{one.max:.6g}", f"{one.min_normal:.4g}", f"{one.min_subnormal:.4g}")
        for name, one in TABLE.items()
    )
    heads = ("format", "bits", "largest", "smallest normal", "smallest")
    note = "The rows of `kernels/formats.py`. Any other `eXmY` is valid, too; `fewbits number 0.3` shows them."
    return f"# Formats\n\n{note}\n\n{_table(heads, rows)}\n"


def api() -> str:
    parts = ["# Python", "`from fewbits import NAME`; a module is imported when one of its names is first used."]
    for name in sorted(fewbits.__all__, key=str.lower):
        value = getattr(fewbits, name)
        parts.append(f"## {name}\n\n{_documented('class' if inspect.isclass(value) else 'function', name, value)}")
    return "\n\n".join(parts) + "\n"


def _documented(kind: str, name: str, value: object, depth: int = 4) -> str:
    fence = ":" * depth
    body = [_prose(inspect.getdoc(value) or "")]
    if kind == "class":
        for member, raw in vars(value).items():
            if member.startswith("_") or not (inspect.isfunction(raw) or isinstance(raw, (property, classmethod))):
                continue
            inner = "property" if isinstance(raw, property) else "method"
            body.append(_documented(inner, member, getattr(value, member) if inner == "method" else raw, depth - 1))
    return f"{fence}{{py:{kind}}} {name}{_signature(kind, value)}\n" + "\n\n".join(body) + f"\n{fence}"


def _signature(kind: str, value: object) -> str:
    if kind == "property" or (kind == "class" and "Quantizer" not in str(value) and "Mixture" not in str(value)):
        return ""
    signature = inspect.signature(value)  # type: ignore[arg-type]
    shown = [one.replace(annotation=one.empty) for one in signature.parameters.values() if one.name != "self"]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


def _prose(text: str) -> str:
    """Return a docstring as Markdown: argument lines as a list, examples as code."""
    out: list[str] = []
    for line in text.splitlines():
        argument = re.match(r"(\w+): ", line)
        if argument:
            line = f"- **{argument[1]}**: {line[argument.end() :]}"
        out.append(line)
    text = "\n".join(out)
    return re.sub(
        r"(^>>> .*?)(?=\n\n|\Z)", lambda match: _block(match[1], "pycon"), text, flags=re.DOTALL | re.MULTILINE
    )


# ------------------------------------------------------------------------------------------------ claims


CLAIMS = """\
# Claims

From `analysis/studies/*/claims.yaml`. Numbers in square brackets are missing from the paper's text as we have it; we
restored them. A star marks the paper's main claims, whose primary parts are corrected together by Holm's method.
*Control* names what the same runs have to show before anything can be told about the claim.
"""
CLAIM_COLUMNS = ("claim", "the paper says", "we test", "control", "margin or bound, and its source")


def claims() -> str:
    """Return Markdown with, for each study, a Markdown table of claims and one of controls."""
    parts = [CLAIMS]
    for study in studies_with_claims():
        of, main = load_claims(study), paper(study).primary
        parts += [f"## {study}", _table(CLAIM_COLUMNS, (_row(claim, claim.id in main) for claim in of.claims))]
        if of.controls:
            rows = ((one.id, one.title, _list(_part(part, part.margin) for part in one.parts)) for one in of.controls)
            parts.append(f"### Controls of {study}\n\n{_table(('control', 'shows', 'test'), rows)}")
    return "\n\n".join(parts) + "\n"


def _row(claim: Claim, main: bool) -> tuple[str, ...]:
    source = claim.source
    tests = _list(_part(part, claim.margin_of(part) if part.margin else None) for part in claim.parts)
    scale = "" if claim.kind is Kind.ARITHMETIC or not claim.judged_at else f"judged at scale `{claim.judged_at}`"
    notes = ". ".join(filter(None, (claim.tests, _needs(claim.needs), scale)))
    bounds = [f"{part.shown_bounds}: {part.reason}" for part in claim.parts if part.reason]
    return (
        f"**{claim.id}**{'*' * main} {claim.statement}",
        f"“{source.sentence}” ({source.place})" if source else "a finding of ours",
        f"{notes}<br>{tests}" if notes else tests,
        ", ".join(claim.control),
        "<br>".join(dict.fromkeys([*([_margin(claim.margin)] if claim.margin else []), *bounds])),
    )


def _part(part: Part, margin: Margin | None) -> str:
    if part.test == "exact":
        return "exact"
    text = f"`{part.test}` {', '.join(part.arms) or f'measured: {part.data}'}" if part.test else "not testable here"
    if part.baseline:
        text += f" beside {part.baseline}"
    if part.arms:
        text += f" by {', '.join(part.metrics)}"
    if part.shown_bounds:
        text += f", {part.shown_bounds}"
    if margin is not None:
        text += f", margin {_margin(margin)}"
    if part.wrong:
        text += f"; {', '.join(part.wrong)} must not pass"
    if needs := _needs(part.needs):
        text += f"; {needs}"
    return f"{part.name}: {text}" if part.name else text


def _needs(needs: Needs) -> str:
    wanted = [f"{amount(needs.parameters)} parameters"] if needs.parameters else []
    wanted += [f"{amount(needs.tokens)} tokens"] if needs.tokens else []
    wanted += [f"stored scores of {needs.scores}"] if needs.scores else []
    wanted += [needs.other] if needs.other else []
    return f"needs {', '.join(wanted)}" if wanted else ""


def _margin(margin: Margin) -> str:
    if margin.third:
        return "a third of what the whole recipe costs in the same runs" + (
            f": {margin.reason}" if margin.reason else ""
        )
    value = margin.value or 0.0
    return f"{f'{100 * value:g} %' if margin.relative else f'{value:g}'}: {margin.reason}"


def _list(parts: Iterable[str]) -> str:
    return "<br>".join(f"• {part}" for part in parts)


REFERENCE: dict[str, Callable[[], str]] = {
    "commands": commands,
    "python": api,
    **{group: listing(group) for group in LISTS},
    "scalings": scalings,
    "formats": formats,
    "claims": claims,
}


# ------------------------------------------------------------------------------------------------ links


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key == "id":
                self.ids.add(value)
            elif value and key in ("href", "src") and not re.match(r"\w+:|//", value):
                self.links.append(unquote(value))


def broken_links(site: Path) -> list[str]:
    """Return the links between pages of the built site that lead to no file, or to no id in it."""
    read: dict[Path, _Page] = {}
    for path in site.rglob("*.html"):
        read[path.resolve()] = page = _Page()
        page.feed(path.read_text("utf-8"))
    broken = []
    for path, page in read.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            missing = target in read and anchor and anchor not in read[target].ids
            if not target.exists() or missing:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken
