"""The package's layers: imports go down only, and never in a circle. Reads sources, so it needs no TensorFlow."""

import ast
import glob
import importlib.util
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ENGINE = {"_check", "_config", "_engine", "_rows", "_tf"}
KERAS = ENGINE | {"_clipping", "_keras"}
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


ELSEWHERE = {
    ("_tf.tracking", "optimizer"): "a switch of TensorFlow's",
    ("_tf.graph_parts", "output"): "a mask or logits, as Keras gives them to its tensors",
    ("_keras._model._optimizers", "model"): "an optimizer in an attribute of the user's",
    ("_tf.watching", "_in_this_thread"): "ours",
    ("_tf.graphs", "function"): "ours",
    ("_tf.models", "model"): "what `compile` received, for files of the model",
    ("_keras._model._accumulation", "optimizer"): "an `accum_steps` that the user has set on a `LossScaleOptimizer`",
}
"""(Module, object) whose attributes are set by name, though nothing of Keras or TensorFlow is replaced."""


def changed_by_name(nodes):
    """The objects whose attributes are set by `setattr`, or in `__dict__` or `vars`, as text."""
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            yield text_of(node.args[0])
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("update", "setdefault", "pop"):
            yield owner(node.func.value)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield owner(node.value)


def text_of(node):
    if isinstance(node, ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    return f"{text_of(node.value)}[]" if isinstance(node, ast.Subscript) else getattr(node, "id", "?")


def owner(node):
    """The object of `object.__dict__` or `vars(object)`, as text, or None."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return text_of(node.value)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars":
        return text_of(node.args[0])
    return None


def test_what_is_replaced_in_keras_and_tensorflow_stands_in_one_file():
    """What is not `self`, or `made` here."""
    found = {
        (name[len("accum.") :], changed)
        for name, path in MODULES.items()
        if layer(name) in ("_tf", "_engine", "_keras", "compat") and name != "accum._tf.patches"
        for changed in changed_by_name(ast.walk(tree_of(path)))
        if changed is not None and changed.split(".")[0] not in ("self", "made")
    }
    assert found == set(ELSEWHERE)


def test_every_patch_is_in_use():
    nodes = tree_of(MODULES["accum._tf.patches"]).body
    names = [node.targets[0].id for node in nodes if isinstance(node, ast.Assign)]
    assert len(names) > 10
    used = {
        node.attr
        for path in MODULES.values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and getattr(node.value, "attr", getattr(node.value, "id", "")) == "patches"
    }
    assert not set(names) - used


def test_contributing_has_the_table_of_patches():
    spec = importlib.util.spec_from_file_location("patches", MODULES["accum._tf.patches"])
    patches = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(patches)
    with open(os.path.join(ROOT, "CONTRIBUTING.md"), encoding="utf-8") as file:
        assert patches.table() in file.read()


PRIVATE = {
    ("_tf.steps", "model._jit_compile"): "how Keras 2 keeps `jit_compile`",
    ("_tf.steps", "generator._seed"): "from which Keras 2 seeds the next operation of a layer",
    ("_tf.strategies", "keys._group_key"): "numbers of a strategy's collectives",
    ("_tf.tracking", "cls._trackable_children"): "of a class of ours: what checkpoints hold",
    ("_tf.tracking", "cls._lookup_dependency"): "of a class of ours: what checkpoints hold",
    ("_tf.variables", "var._get_cross_replica"): "of a variable of ours: what checkpoints hold of it",
    ("_tf.variables", "var._gather_saveables_for_checkpoint"): "of a variable of ours: what checkpoints hold of it",
}
"""(Module, private attribute of TensorFlow or Keras): why it is assigned to, though nothing shared is replaced."""

OURS = {"graph._accum_notes", "run._is_at_once", "run._leaves", "run._stored", "run._whole_values"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_private_attributes_of_others_are_assigned_in_one_layer():
    found = set()
    for name, path in MODULES.items():
        if layer(name) in ("_tf", "_engine", "_keras", "compat") and name != "accum._tf.patches":
            nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
            texts = {text_of(node) for node in nodes if isinstance(node.ctx, ast.Store) and is_private(node.attr)}
            found |= {(name[len("accum.") :], text) for text in texts if text.split(".")[0] not in ("self", "made")}
    found = {one for one in found if one[1] not in OURS and not one[1].endswith("._keras_mask")}
    assert found == set(PRIVATE)


DIAGNOSIS = "accum._keras._diagnosis"


def test_the_rules_that_read_a_model_are_reached_through_one_table():
    inside = {name for name in MODULES if name.startswith(DIAGNOSIS + ".")}
    taken = set().union(*[imported(ast.walk(tree_of(MODULES[name]))) for name in MODULES if name not in inside])
    assert {name for name in taken - {DIAGNOSIS} if name.startswith(DIAGNOSIS)} == {DIAGNOSIS + "._rules"}
    table = next(
        node.value
        for node in tree_of(MODULES[DIAGNOSIS + "._rules"]).body
        if isinstance(node, ast.AnnAssign) and text_of(node.target) == "RULES"
    )
    applied = {node.id for node in ast.walk(table) if isinstance(node, ast.Name)}
    functions = [node for name in inside for node in tree_of(MODULES[name]).body if isinstance(node, ast.FunctionDef)]
    rules = {node.name for node in functions if node.name.startswith("warn_of_")}
    assert rules - applied == {"warn_of_batch_norms"}  # which others call


@pytest.mark.parametrize("name", sorted(name for name in MODULES if ".compat." in name or "._diagnosis" in name))
def test_an_error_within_a_rule_never_reaches_the_user(name):
    functions = [node for node in ast.walk(tree_of(MODULES[name])) if isinstance(node, ast.FunctionDef)]
    rules = [node for node in functions if node.name.startswith("warn_of_")]
    assert all([text_of(one) for one in node.decorator_list] == ["_check.rule"] for node in rules)
