"""Test the Dockerfile: the files that it copies exist, and it installs what Ray's cluster launcher imports."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
import yaml

from tests.infra.manifests import INFRA, ROOT


@dataclass(frozen=True)
class Instruction:
    name: str
    words: str
    stage: int


def parse(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: list[Instruction] = []
    stage = -1
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, words = line.partition(" ")
            stage += name == "FROM"
            found.append(Instruction(name, words.strip(), stage))
    return found


PARSED = parse((INFRA / "Dockerfile").read_text())


def words_of(name: str, stage: int | None = None) -> list[str]:
    return [each.words for each in PARSED if each.name == name and stage in (None, each.stage)]


def test_what_it_copies_exists_and_is_in_the_context() -> None:
    ignored = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    stages = {match[1] for base in words_of("FROM") if (match := re.search(r" AS (\w+)$", base))}
    copied = set()
    for words in words_of("COPY"):
        *sources, _ = shlex.split(words)
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages
            continue
        copied |= set(sources)
    assert all((ROOT / source).exists() for source in copied)
    assert copied == let_in


def test_each_linked_package_is_copied() -> None:
    packages = {link.name for link in (ROOT / "src" / "fewbits").iterdir() if link.is_symlink()}
    assert packages
    assert {words.split()[0] for words in words_of("COPY")} >= packages | {"src", "pyproject.toml", "constraints.txt"}


def test_it_installs_what_the_cluster_launcher_of_each_provider_imports() -> None:
    """The image has all packages that Ray's cluster launcher imports for the provider in ray-cluster.yaml.

    Ray imports them only when `ray up` runs, so that a missing package would be noticed only then.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.findall(r"\.\[([\w,-]+)\]", words_of("RUN", 0)[-1])[0].split(",")
    assert {"cuda", "titan", "aws"} <= set(installed) <= set(extras)
    provider = yaml.safe_load((INFRA / "ray-cluster.yaml").read_text())["provider"]["type"]
    folder = Path(ray.__file__).parent / "autoscaler" / "_private" / provider
    imported = {name for file in folder.rglob("*.py") for name in top_level_imports(file)}
    foreign = imported - set(sys.stdlib_module_names) - {"ray"}
    assert "boto3" in foreign
    provided = {re.split(r"[<>=\[]", package)[0] for extra in installed for package in extras[extra]}
    assert foreign <= provided | {"botocore", "packaging"}  # these two are dependencies of boto3 and ray


def top_level_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
