"""Test the import rule: commands → analysis → sweeps → experiments → models → kernels → common, and no import cycles.

A package may import only from packages to its right. No two folders of a package import each other. Imports are read
from syntax trees, so imports inside functions, under `if TYPE_CHECKING` and by `import_module` count, too.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each may import from earlier ones.
PACKAGES = ("common", "kernels", "models", "experiments", "sweeps", "analysis", "commands")

# Libraries that a package must not import: models do not read configs or track runs, and a trial does not use Ray. Only
# the modules in TITAN may import torchtitan.
_TRACKING = {"ray", "mlflow", "hydra", "omegaconf", "torchtitan"}
FOREIGN = {
    "common": {*_TRACKING, "torch"},
    "kernels": _TRACKING,
    "models": _TRACKING,
    "experiments": {"ray", "torchtitan"},
    "sweeps": {"torchtitan"},
    "analysis": {"torchtitan"},
    "commands": {"torchtitan"},
}
TITAN = tuple(f"fewbits.experiments.{name}" for name in ("titan", "titan_models"))
MUTUAL = {"analysis"}  # packages whose folders still import each other; others must not
NOTEBOOKS = re.compile(r"fewbits\.analysis\.studies\.\w+\.notebook$")  # may use the public API, as users do
MODULE = re.compile(rf"fewbits\.({'|'.join(PACKAGES)})(\.\w+)*")

Imports = dict[str, tuple[Path, list[tuple[int, str]]]]  # module → its file and (line, absolute name) of each import


def imports_of(root: Path) -> Imports:
    """Return the imports of each module; its name is, for example, `fewbits.kernels.formats`, or `fewbits` itself."""
    files = {f"fewbits.{path.stem}".removesuffix(".__init__"): path for path in (root / "src" / "fewbits").glob("*.py")}
    for package in PACKAGES:
        folder = root / "src" / "fewbits" / package if package in ("common", "commands") else root / package
        for path in folder.rglob("*.py"):
            files[".".join(("fewbits", package, *path.relative_to(folder).with_suffix("").parts))] = path
    trees = {name: ast.parse(path.read_text("utf-8"), str(path)) for name, path in files.items()}
    return {name: (files[name], sorted(set(imports(name, tree)))) for name, tree in sorted(trees.items())}


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of each import in a module; for `from a import b`, the name is a.b.

    Text constants that are names of fewbits' modules count as imports, too. module: the name of the importing module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute("." * node.level + (node.module or ""), module)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str):
                yield node.lineno, absolute(name, module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            yield node.lineno, node.value  # for example in a table of modules that are imported later


def absolute(name: str, module: str) -> str:
    """Return the absolute name of an import: `..models` in a module of fewbits.kernels is fewbits.models."""
    level = len(name) - len(name.lstrip("."))
    return ".".join(part for part in (*module.split(".")[:-level], name[level:]) if part) if level else name


def breach(module: str, name: str) -> str | None:
    """Return why `module` must not import `name`, or None if it may."""
    package = module.split(".")[1]
    top, *rest = name.split(".")
    if top in FOREIGN[package] and not (module in TITAN and top == "torchtitan"):
        return f"{package} must not import {top}"
    if top in PACKAGES:
        return f"import it as fewbits.{top}"
    if top != "fewbits" or name == "fewbits.version.__version__":
        return None
    if NOTEBOOKS.match(module) and rest and rest[0] not in PACKAGES:
        return None
    if not rest or rest[0] not in PACKAGES:
        return "inside the packages, import from the module that defines the name"
    if PACKAGES.index(rest[0]) > PACKAGES.index(package):
        return f"{package} must not import {rest[0]}"
    return None


def graph_of(modules: Imports) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    named = {module: {name for _, name in found} for module, (_, found) in modules.items()}
    return {
        module: {one for name in names for one in (name, name.rpartition(".")[0]) if one in modules} - {module}
        for module, names in named.items()
    }


def violations(root: Path) -> list[str]:
    """Return a line for each import that the rule forbids, and one if there is a cycle."""
    modules = imports_of(root)
    found = [
        f"{file.relative_to(root)}:{line}: imports {name}: {wrong}"
        for module, (file, names) in modules.items()
        for line, name in names
        if module.count(".") > 1 and (wrong := breach(module, name))
    ]
    try:
        TopologicalSorter(graph_of(modules)).prepare()
    except CycleError as error:
        found.append(f"an import cycle: {' → '.join(reversed(error.args[1]))}")
    return found


def mutual(root: Path) -> list[str]:
    """Return a text for each two folders of one package that import each other, also by way of other modules."""

    def node(module: str) -> str:
        return ".".join(module.split(".")[:3])  # a folder of a package, or a module beside the folders

    modules = imports_of(root)
    graph: dict[str, set[str]] = {}
    for module, names in graph_of(modules).items():
        inside = {node(name) for name in names if name.split(".")[1:2] == module.split(".")[1:2]}
        graph.setdefault(node(module), set()).update(inside)
    reach = {name: reached(graph, name) for name in sorted({node(one) for one in modules if one.count(".") > 2})}
    return [f"{a} and {b}" for a, b in combinations(reach, 2) if b in reach[a] and a in reach[b]]


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_the_packages_follow_the_import_rule() -> None:
    assert violations(ROOT) == []
    assert len(imports_of(ROOT)) > 100, "no module was checked"


def test_folders_of_a_package_import_one_way() -> None:
    assert {text.split(".")[1] for text in mutual(ROOT)} == MUTUAL
