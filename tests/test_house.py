"""Rules of this repository: import order, and sizes of functions (docs/architecture.md)."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from flax import nnx

from peagle_jax.checkpoint import load_head, load_target
from peagle_jax.training.trainer import split_model
from tests import tiny

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "peagle_jax", "convert", "serving", "bench", "lab", "tests")

FOLDERS = [
    "root",
    "parallel",
    "models",
    "method",
    "devices",
    "checkpoint",
    "text",
    "engine/structured",
    "engine/host",
    "engine/device",
    "engine",
    "cli",
    "training",
    "interface",
]
"""Folders of peagle_jax; each imports only those before it, and itself without circles."""

FOLDER_OF = {
    "devices": "devices",
    "__init__": "interface",
    "__main__": "interface",
}
"""Files beside the folders; the others are the root, which every folder may import."""

MAY_IMPORT = {
    "pallas_kernels": {"pallas_kernels"},
    "peagle_jax": {"peagle_jax", "pallas_kernels"},
    "convert": {"convert", "peagle_jax"},
    "serving": {"serving", "peagle_jax"},
    "bench": set(PACKAGES) - {"tests", "lab"},
    "lab": set(PACKAGES),
    "tests": set(PACKAGES) - {"lab"},
}
AT_HOME = {
    "grpc": ("serving/rpc/", "serving/client/", "tests/", "bench/", "lab/"),
    "starlette": ("serving/http/", "tests/"),
    "uvicorn": ("serving/http/", "tests/"),
    "transformers": (
        "peagle_jax/text/tokenizer.py",
        "peagle_jax/text/text_process.py",
        "convert/",
        "bench/",
        "lab/",
        "tests/",
    ),
    "torch": ("tests/golden/",),
    "gguf": ("peagle_jax/checkpoint/gguf_file.py", "tests/"),
}
"""Third parties that live in some places only; tests and benches may talk to anything they test."""

INTERNALS_OF_JAX = ("jax._src", "jaxlib", "jax.experimental.mosaic")
MAY_USE_INTERNALS = {
    "pallas_kernels/mlir_compat.py": "MLIR operations and Mosaic's arrays, for the kernels",
    "peagle_jax/engine/device/stored_programs.py": "the place of jax's own compilation cache",
    "peagle_jax/training/flash.py": "cuDNN attention that returns its log-sum-exp",
    "tests/kernels/conftest.py": "the races that Mosaic's interpreter found",
}
"""A new version of jax may rename names that are not public. Then only these files change."""

FILES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))  # generated
)
NAMES = [str(path.relative_to(ROOT)) for path in FILES]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


@cache
def imports(name: str) -> set[str]:
    """Modules that a file imports anywhere; `from package import module` counts as the module."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {module for module in inner if is_module(module)}
            found |= modules or {node.module}
    return found


def module_of(name: str) -> str:
    """peagle_jax/engine/host/pages.py -> peagle_jax.engine.host.pages, without __init__."""
    return ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_those_below_them(package):
    for name in NAMES:
        if name.startswith(f"{package}/"):
            ours = {module.split(".")[0] for module in imports(name)} & set(PACKAGES)
            allowed = MAY_IMPORT[package]
            if package == "lab" and not name.startswith("lab/tests/"):
                allowed = allowed - {"tests"}
            assert ours <= allowed, f"{name} imports {ours - allowed}"


def test_kernels_need_nothing_but_jax():
    for name in NAMES:
        if name.startswith("pallas_kernels/"):
            tops = {module.split(".")[0] for module in imports(name)}
            foreign = tops - set(sys.stdlib_module_names) - {"jax", "numpy", "pallas_kernels"}
            assert not foreign, f"{name} imports {foreign}"


@pytest.mark.parametrize("library", AT_HOME)
def test_some_libraries_live_in_one_place(library):
    for name in NAMES:
        if library in {module.split(".")[0] for module in imports(name)}:
            assert name.startswith(AT_HOME[library]), f"{name} imports {library}"


def test_internals_of_jax_are_imported_in_few_places():
    used = {
        name
        for name in NAMES
        for module in imports(name)
        if module.startswith(tuple(f"{one}." for one in INTERNALS_OF_JAX))
        or module in INTERNALS_OF_JAX
    }
    assert used == MAY_USE_INTERNALS.keys()


def folder_of(module: str) -> str:
    """peagle_jax.engine.host.pages -> engine/host."""
    parts = module.split(".")[1:]
    if (ROOT / "peagle_jax").joinpath(*parts).is_dir():
        parts.append("__init__")
    *folders, name = parts
    return "/".join(folders) if folders else FOLDER_OF.get(name, "root")


def test_each_folder_of_peagle_jax_imports_only_those_before_it():
    for name in NAMES:
        if not name.startswith("peagle_jax/"):
            continue
        here = FOLDERS.index(folder_of(module_of(name)))
        for module in imports(name):
            if module.startswith("peagle_jax."):
                folder = folder_of(module)
                assert FOLDERS.index(folder) <= here, f"{name} imports {module} of {folder}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_have_no_import_circles(package):
    """Imports for types and within functions count too."""
    mine = {module_of(name): imports(name) for name in NAMES if name.startswith(f"{package}/")}
    graph = {module: found & mine.keys() - {module} for module, found in mine.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


EDGES = ("rpc", "http", "client")
"""Folders of serving that speak a protocol; what they share stands in serving itself."""

TOGETHER = (["app.py"], ["engine_process.py"])
"""They put the edges together, each in a process of its own."""


def test_protocol_folders_of_serving_do_not_import_each_other():
    for name in NAMES:
        folder, *rest = Path(name).parts
        if folder != "serving" or rest in TOGETHER:
            continue
        others = {f"serving.{edge}" for edge in EDGES if edge != rest[0]}
        wrong = {m for m in imports(name) if ".".join(m.split(".")[:2]) in others}
        assert not wrong, f"{name} imports {wrong}"


def test_the_host_side_of_the_engine_needs_no_jax():
    modules = [module_of(name) for name in NAMES if name.startswith("peagle_jax/engine/host/")]
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def is_kernel(name: str) -> bool:
    return name.startswith(("pallas_kernels/", "lab/lesson/")) and Path(name).stem.startswith(
        "mosaic"
    )


def oversized(name: str) -> list[str]:
    """The functions of a file that are too long or take too many parameters."""
    found = []
    for node in ast.walk(tree(name)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = node.end_lineno - node.lineno + 1
        if length > (200 if is_kernel(name) else 80):
            found.append(f"{name}: {node.name} has {length} lines")
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [arg.arg for arg in args if arg.arg not in ("self", "cls")]
        if len(names) > 10 and not is_kernel(name):
            found.append(f"{name}: {node.name} takes {len(names)} parameters")
    return found


def test_functions_stay_small():
    assert [line for name in NAMES for line in oversized(name)] == []


def test_classes_of_kernels_have_names_of_their_own():
    """But for the two that every operation has."""
    found = [
        node.name
        for name in NAMES
        if name.startswith("pallas_kernels/")
        for node in tree(name).body
        if isinstance(node, ast.ClassDef) and node.name not in ("Spec", "TuningConfig")
    ]
    assert sorted(found) == sorted(set(found))


def test_test_files_have_names_of_their_own():
    """pytest imports files of a folder that is no package by their names alone."""
    alone = [
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert sorted(alone) == sorted(set(alone))


def test_names_say_what_a_file_is_for():
    forbidden = re.compile(r"(^|_)(utils?|helpers?)($|_)|_v\d+$")
    for name in NAMES:
        parts = [Path(part).stem for part in Path(name).parts]
        assert not any(map(forbidden.search, parts)), f"{name} needs a name of its own"


def test_tests_wait_for_events_in_one_way():
    """A loop of its own that sleeps has no limit, or one that a busy machine reaches."""
    offenders = [
        f"{name}:{loop.lineno}: use tests.waiting.eventually"
        for name in NAMES
        if name.startswith("tests/") and name != "tests/waiting.py"
        for loop in ast.walk(tree(name))
        if isinstance(loop, ast.While)
        for node in ast.walk(loop)
        if isinstance(node, ast.Attribute) and node.attr == "sleep"
    ]
    assert offenders == []


def test_golden_files_stay_below_ten_megabytes():
    files = (ROOT / "tests" / "golden").glob("*/*")
    sizes = (path.stat().st_size for path in files if path.suffix != ".pyc")
    assert sum(sizes) < 10e6


def test_only_command_lines_print():
    for name in NAMES:
        if Path(name).name == "__main__.py" or name.startswith(("bench/", "lab/")):
            continue
        for node in ast.walk(tree(name)):
            is_print = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
            assert not is_print, f"{name}:{node.lineno} prints"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_models_are_plain_trees(family):
    """Flax is to make tree mode its default: no shared references, no plain lists of modules."""
    golden = ROOT / "tests" / "golden"
    with nnx.set_graph_mode(False):
        tiny.target(family=family, qk_norm=family == "qwen3", tie_embeddings=family == "qwen3")
        target = load_target(golden / family, dtype="float32")
        for method in ("peagle", "eagle3", "dflash"):
            head = tiny.head(method, draft_vocab_size=50, fc_norm=True, own_embedding=False)
            params, merge = split_model(head)
            assert len(split_model(merge(params))[0]) == len(params)
        if family == "qwen3":
            load_head(golden / "peagle-pruned", target.config, dtype="float32")
