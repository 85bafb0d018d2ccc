"""The repository's own promises: versions, docstrings, licence, imports of the pure parts, no path of a workplace."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import adaptivespec

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "adaptivespec"
MODULES = sorted(PACKAGE.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of every import in a file, also inside functions."""
    package = ("adaptivespec", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *([node.module] if node.module else [])])


def _foreign(path: Path, allowed: set[str], own: str) -> set[str]:
    names = set(_imports(path))
    return {
        name
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names | allowed and name != own and not name.startswith(own + ".")
    }


def test_version_is_the_one_of_pyproject() -> None:
    try:
        installed = importlib.metadata.version("adaptivespec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("adaptivespec is not installed")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert adaptivespec.__version__ == installed == declared


def test_changelog_and_constraints_know_the_project() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==\S+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    missing = {r for r in wanted if re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", r)[0]).lower() not in normal}
    assert not missing


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_import_is_quick_and_lazy() -> None:
    code = "import sys, adaptivespec; print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", adaptivespec.__all__)
def test_export_exists(name: str) -> None:
    assert getattr(adaptivespec, name) is not None
    assert name in dir(adaptivespec)


def test_unknown_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = adaptivespec.LMM


def test_method_imports_torch_only() -> None:
    paths = sorted((PACKAGE / "method").rglob("*.py"))
    assert paths
    assert not {path.name: names for path in paths if (names := _foreign(path, {"torch"}, "adaptivespec.method"))}


def test_config_imports_pydantic_only() -> None:
    assert not _foreign(PACKAGE / "config.py", {"pydantic"}, "adaptivespec.errors")


def test_every_setting_is_documented() -> None:
    from adaptivespec import EngineConfig, SamplingParams, SpeculativeConfig

    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    names = [name for kind in (SpeculativeConfig, SamplingParams, EngineConfig) for name in kind.model_fields]
    assert not [name for name in names if f"`{name}`" not in text]


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text)
    assert [int(n) for n in re.findall(r"^   (\d+)\. [A-Z]", text, re.MULTILINE)] == list(range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in text
    assert "APPENDIX: How to apply the Apache License" in text


def test_no_file_names_a_workplace() -> None:
    """No absolute path of the machine it was written on, in any file git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    workplace = re.compile(rb"(?<![\w.~-])/(?:work|root|home/\w+)/")
    found = []
    for path in (ROOT / name for name in listing.stdout.split("\0") if name):
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data[:8192]:
            found += [f"{path.relative_to(ROOT)}: {line.decode(errors='replace')}" for line in data.splitlines() if workplace.search(line)]
    assert not found
