"""Imports go one way, and an algorithm knows nothing of engines, data or files."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "fedminimax"
# fmt: off
ORDER = [
    "random", "blocks", "types", "metrics", "data", "models", "problems", "algorithms", "messages",
    "engine", "config", "experiment", "deploy", "estimator_files", "estimator", "tuning", "report",
    "bench", "cli",
]
# fmt: on


def imported(file: Path) -> set[str]:
    """The parts of the package that a file imports when it is loaded."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names |= {m.split(".")[1] for m in modules if m.startswith("fedminimax.")}
    return names


def test_imports_go_one_way():
    backwards = []
    for file in sorted(SOURCE.rglob("*.py")):
        part = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part not in ORDER:
            assert part in ("__init__", "__main__"), f"{file} has no place in the order of imports"
            continue
        for other in imported(file):
            if ORDER.index(other) > ORDER.index(part):
                backwards.append(f"{file.relative_to(SOURCE)} imports {other}")
    assert not backwards


def test_algorithms_import_only_what_the_paper_needs():
    for file in (SOURCE / "algorithms").glob("*.py"):
        allowed = {"types", "blocks", "problems", "algorithms"}
        assert imported(file) <= allowed, file.name


def test_nothing_is_unpickled_and_no_foreign_file_is_loaded_unsafely():
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not {"pickle", "dill", "joblib"} & {a.name for a in node.names}, file.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), file.name


def test_the_page_names_every_module_and_the_order_of_imports():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    for file in SOURCE.rglob("*.py"):
        package = file.parent.relative_to(SOURCE).as_posix()
        if file.stem in ("__init__", "__main__"):
            continue
        if package == "algorithms" and not file.stem.startswith("_"):
            continue  # "a method per file": those have pages of their own
        section = sections["The contract and the top" if package == "." else package]
        assert f"`{file.name}`" in section, file
    order = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]  # type: ignore[index]
    named = re.findall(r"\w+", order)
    assert named == [part for part in ORDER if part != "estimator_files"]
