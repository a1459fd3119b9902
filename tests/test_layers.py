"""Imports point one way only (docs/ARCHITECTURE.md): a folder may import what its row names, and itself."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "forebay"
LAYERS = {
    "core": set(),
    "observe": {"core"},
    "compiled": set(),
    "machine": set(),
    "store": {"core", "observe", "settings", "compiled", "machine"},
    "models": {"core", "compiled"},
    "sim": {"core", "store", "observe", "settings"},
    "runtime": {"core", "observe", "store", "models", "settings", "compiled", "machine"},
    "frontend": {"core", "observe", "models", "runtime", "settings"},
    "bench": {
        "machine",
        "core",
        "observe",
        "models",
        "runtime",
        "store",
        "sim",
        "frontend",
        "settings",
    },
    "cli": {
        "core",
        "observe",
        "models",
        "runtime",
        "store",
        "sim",
        "frontend",
        "bench",
        "settings",
    },
    "settings": {"core"},
    "__init__": {"core", "frontend"},
}
PURE = {
    "torch",
    "socket",
    "threading",
    "time",
    "random",
    "asyncio",
    "zmq",
    "os",
    "pathlib",
    "subprocess",
    "io",
}
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    here = layer(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "forebay" and len(parts) > 1 and parts[1] not in (here, "__version__"):
            assert parts[1] in LAYERS[here], f"{here} imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_the_core_is_sans_io(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)} & PURE
    assert not used, f"core/{path.name} imports {used}"


def test_every_folder_has_a_layer() -> None:
    assert {layer(path) for path in MODULES} <= set(LAYERS)
