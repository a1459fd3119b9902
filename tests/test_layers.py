"""Imports point one way only (docs/ARCHITECTURE.md): a folder may import what its row names, and itself.

Inside a package the same holds for its folders, and no two modules import each other, however far around."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "forebay"
LAYERS = {
    "pages": {"store"},
    "core": {"pages"},
    "observe": {"core"},
    "cache": set(),
    "compiled": {"cache"},
    "machine": set(),
    "store": {"core", "observe", "settings", "compiled", "machine", "cache"},
    "models": {"core", "pages", "compiled", "cache"},
    "sim": {"core", "pages", "store", "observe", "settings"},
    "runtime": {
        "core",
        "pages",
        "observe",
        "store",
        "models",
        "settings",
        "compiled",
        "machine",
        "cache",
    },
    "frontend": {"core", "pages", "observe", "models", "runtime", "settings"},
    "bench": {
        "pages",
        "cache",
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
# Inside a package: what a folder imports of the others. "" is the package's own modules. Where both
# import each other it is modules that keep the order (`test_no_module_imports_itself_around`).
FOLDERS = {
    "bench": {"": {"ttft"}, "tiers": {"", "ttft"}, "ttft": {""}},
    "core": {"": {"transfers"}, "transfers": {""}},
    "frontend": {"": {"tools"}, "tools": set()},
    "models": {"": {"native"}, "native": {""}},
    "store": {
        "": {"backends", "client", "holder", "holder/log", "master", "wire"},
        "backends": {
            "",
            "backends/mooncake",
            "backends/redis",
            "client",
            "holder",
            "holder/log",
            "master",
            "wire",
        },
        "backends/mooncake": {"", "backends", "client", "native"},
        "backends/redis": {"", "backends", "client"},
        "client": {"", "holder", "holder/log", "native", "wire"},
        "holder": {"", "holder/log", "master", "native", "wire"},
        "holder/log": {"", "holder", "native", "wire"},
        "master": {"", "wire"},
        "native": {""},
        "wire": {""},
    },
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


def module(path: Path) -> str:
    return ".".join(("forebay", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


BY_NAME = {module(path): path for path in MODULES}


def imported_modules(path: Path) -> set[str]:
    """Modules of this project that ``path`` imports; names in them count as their module."""
    found = {name if name in BY_NAME else name.rpartition(".")[0] for name in imports(path)}
    return {name for name in found & set(BY_NAME) if name != module(path)}


def folder(path: Path) -> str:
    """Below its package; "" for the package's own modules."""
    return "/".join(path.relative_to(ROOT).parts[1:-1])


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_of_a_package_import_one_way(path: Path) -> None:
    package, here = layer(path), folder(path)
    for name in imported_modules(path):
        other = BY_NAME[name]
        if layer(other) == package and folder(other) != here:
            allowed = FOLDERS.get(package, {}).get(here, set())
            assert folder(other) in allowed, f"{package}/{here} imports {name}"


def test_no_module_imports_itself_around() -> None:
    """Also not for types alone: two modules that need each other's types are one, or need a Protocol."""
    left = {name: imported_modules(path) for name, path in BY_NAME.items()}
    while leaves := {name for name, needs in left.items() if not needs & set(left)}:
        left = {name: needs for name, needs in left.items() if name not in leaves}
    assert not left, f"a circle is among {sorted(left)}"


def test_pages_needs_neither_torch_nor_the_engine() -> None:
    """What a plug-in of another engine imports: of the store the interface alone."""
    for path in sorted((ROOT / "pages").rglob("*.py")):
        for name in imports(path):
            assert not name.startswith("torch"), f"{path.name} imports {name}"
            if name.startswith("forebay."):
                assert name.startswith(("forebay.pages.", "forebay.store.backend.")), (
                    f"{path.name} imports {name}"
                )


def test_the_core_takes_hashes_alone_from_pages() -> None:
    for path in sorted((ROOT / "core").rglob("*.py")):
        for name in imports(path):
            assert not name.startswith("forebay.pages") or name.startswith(
                "forebay.pages.hashing."
            ), f"core/{path.name} imports {name}"
