"""The package's layers: imports go down only, and never in a circle. Reads sources, so it needs no TensorFlow."""

import ast
import glob
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ENGINE = {"_check", "_engine", "_rows", "_tf"}
KERAS = ENGINE | {"_clipping", "_config", "_keras"}
MAY_IMPORT = {
    # what every layer may ask
    "_check": set(),
    "_entry": {"_public"},
    "_tf": {"_tf"},
    "_rows": {"_rows", "_tf"},
    # the engine, and what stands on it
    "_engine": ENGINE,
    "_config": {"_check", "_tf"},
    "_clipping": {"_check", "_clipping", "_config", "_tf"},
    # the APIs, which do not import each other
    "_keras": KERAS,
    "compat": ENGINE | {"compat"},
    # tools
    "convert": KERAS | {"convert"},
    "testing": KERAS | {"testing"},
    "_migrate": {"_migrate"},
    # what `import accum` shows, and the command line
    "_public": {"_check", "_clipping", "_keras", "_tf"},
    "": {"_entry", "_public"},
    "_cli": {"", "_check", "_cli", "_migrate", "_tf", "compat", "convert", "testing"},
    "__main__": {"", "_cli"},
}
PUBLIC = {
    "AccumBatchNormalization",
    "AccumulationScheduler",
    "AdaptiveClipping",
    "FlushCallback",
    "GAModelWrapper",
    "GAOptimizerWrapper",
    "GradientAccumulateModel",
    "GradientAccumulateOptimizer",
    "InexactWarning",
    "NoiseScaleScheduler",
    "StepLogger",
    "__version__",
    "adaptive_clip_grad",
    "compute_norm",
    "replace_batchnorm_layers",
    "unwrap",
    "unitwise_norm",
    "value_and_gradients",
}


def modules():
    """{full name: path} of every module; `compat` lies beside the package and is `accum.compat` in it."""
    paths = {}
    for folder in ("accum", "compat"):
        for path in glob.glob(os.path.join(ROOT, folder, "**", "*.py"), recursive=True):
            parts = os.path.relpath(path, ROOT)[: -len(".py")].split(os.sep)
            if parts[:2] == ["accum", "compat"]:
                continue  # the link, for editors
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            paths[".".join(parts if parts[0] == "accum" else ["accum"] + parts)] = path
    return paths


MODULES = modules()


def tree_of(path):
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


def imported(nodes):
    """Full names of the modules of accum that import statements among `nodes` bring."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not looked into here"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in within}
    return {name for name in names if name in MODULES}


def layer(name):
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down_only(name):
    """Also those within functions."""
    above = {
        other for other in imported(ast.walk(tree_of(MODULES[name]))) if layer(other) not in MAY_IMPORT[layer(name)]
    }
    assert not above


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_has_one_subject(name):
    """The function `value_and_gradients` has two words for one thing."""
    assert "_and_" not in name.rpartition(".")[2].replace("value_and_gradients", "")


def test_no_modules_import_each_other_in_a_circle():
    """Nor by imports within functions or for type checkers."""
    graph = {name: imported(ast.walk(tree_of(path))) - {name} for name, path in MODULES.items()}
    while graph:
        free = {name for name, needed in graph.items() if not needed & set(graph)}
        assert free, f"in a circle, or behind one: {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


@pytest.mark.parametrize("name", sorted(name for name in MODULES if layer(name) in ("_check", "_engine")))
def test_the_engine_knows_nothing_of_keras(name):
    nodes = ast.walk(tree_of(MODULES[name]))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr == "keras"]


def test_the_root_package_has_the_public_names():
    lists = [node.value for node in ast.walk(tree_of(MODULES["accum._public"])) if is_of_all(node)]
    assert {name for listed in lists for name in ast.literal_eval(listed)} | {"__version__"} == PUBLIC


def is_of_all(node):
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return isinstance(node, (ast.Assign, ast.AugAssign)) and getattr(targets[0], "id", "") == "__all__"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if MODULES[name].endswith("__init__.py")))
def test_a_package_says_what_it_holds(name):
    assert ast.get_docstring(tree_of(MODULES[name]))
