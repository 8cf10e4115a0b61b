"""Imports go one way, and an algorithm knows nothing of engines, data or files."""

import ast
import re
from pathlib import Path

import diagram

SOURCE = Path(__file__).parent.parent / "src" / "fedminimax"
BENCH = Path(__file__).parent.parent / "bench"  # no part of the package
# fmt: off
ORDER = [
    "random", "blocks", "types", "metrics", "data", "models", "privacy", "problems", "algorithms",
    "messages",
    "methods", "schedules", "sets", "extend",
    "engine", "config", "experiment", "tuning", "remote", "estimator", "report", "cli",
]
NETWORK = {
    "nvflare", "flwr", "grpc", "socket", "socketserver", "ssl", "http", "urllib", "ftplib",
    "smtplib", "telnetlib", "xmlrpc", "asyncio", "requests", "httpx", "aiohttp", "websockets",
}
# fmt: on
OTHER_NETWORK = (
    "data/download.py",  # files of data sets, from where they are published
    "bench/jobs/flower_job.py",  # runs in an environment of its own
)


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


def test_the_package_is_loaded_without_the_bench():
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "bench" not in {name.split(".")[0] for name in named}, file


def test_algorithms_import_only_what_the_paper_needs():
    for file in (SOURCE / "algorithms").glob("*.py"):
        allowed = {"types", "blocks", "problems", "algorithms"}
        assert imported(file) <= allowed, file.name


def test_algorithms_ask_for_rows_through_the_oracle_alone():
    """What computes from rows is called in problems/gradients.py, where privacy is kept."""
    of_rows = {"inner", "outer", "dual_statistics", "answer", "class_losses", "losses", "scores"}
    past = []
    for file in sorted((SOURCE / "algorithms").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name == "problem" and node.func.attr in of_rows:
                past.append(f"{file.name}: problem.{node.func.attr}")
    assert not past


def test_only_remote_speaks_over_a_network():
    elsewhere = []
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE).as_posix()
        if place.startswith(("remote/", "cli")) or place in OTHER_NETWORK:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            elsewhere += [f"{place} imports {m}" for m in modules if m.split(".")[0] in NETWORK]
    assert not elsewhere


def test_nothing_is_unpickled_and_no_foreign_file_is_loaded_unsafely():
    for file in (*SOURCE.rglob("*.py"), *BENCH.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not {"pickle", "dill", "joblib"} & {a.name for a in node.names}, file.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), file.name


def test_the_pages_name_every_module_and_the_order_of_imports():
    docs = SOURCE.parents[1] / "docs"
    page, modules = ((docs / name).read_text() for name in ("architecture.md", "modules.md"))
    sections = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", modules, re.DOTALL | re.MULTILINE))
    for file in (*SOURCE.rglob("*.py"), *BENCH.rglob("*.py")):
        above = SOURCE if file.is_relative_to(SOURCE) else BENCH.parent
        package = file.parent.relative_to(above).as_posix()
        if file.stem in ("__init__", "__main__"):
            continue
        if package == "algorithms" and not file.stem.startswith("_"):
            continue  # "a method per file": those have pages of their own
        section = sections["The contract and the top" if package == "." else package]
        assert f"`{file.name}`" in section, file
    order = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]  # type: ignore[index]
    named = re.findall(r"\w+", order)
    assert named == ORDER


def test_the_drawing_is_up_to_date_and_its_arrows_are_imports():
    assert diagram.FILE.read_text(encoding="utf-8") == diagram.drawing(), "run make pages"
    for start, end in diagram.ARROWS:
        assert uses(start, end) or uses(end, start), f"{start} -> {end}"


def uses(module: str, other: str) -> bool:
    """Does the first file import the second when it is loaded?"""
    name = "fedminimax." + other.removesuffix(".py").replace("/", ".")
    package, _, last = name.rpartition(".")
    imports = [
        node
        for node in ast.parse((SOURCE / module).read_text()).body
        if isinstance(node, ast.ImportFrom)
    ]
    return any(
        node.module == name or (node.module == package and last in {a.name for a in node.names})
        for node in imports
    )
