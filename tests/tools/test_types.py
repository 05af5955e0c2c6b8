"""Types for users: every public signature has them, and the package says so."""

import ast
import inspect
import os

import pytest

import accum
import accum.compat.v1
import accum.convert
import accum.testing
from accum._engine import _plan
from accum._keras._model import _options

PUBLIC = [
    pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")
    for module in (accum, accum.compat.v1, accum.convert, accum.testing)
    for name in module.__all__
    if name != "__version__"
]


def functions_of(value):
    """{name: function} of what is called of a public function or class, where it is accum's own and not inherited."""
    if not inspect.isclass(value):
        return {value.__name__: value}
    functions = {}
    for name, member in vars(value).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        is_shown = not name.startswith("_") or name in ("__init__", "__call__")
        if is_shown and inspect.isfunction(member) and member.__module__.startswith("accum."):
            functions[name] = inspect.unwrap(member)
    return functions


def without_type(value):
    """The parameters and results that have none, as "function(parameter)" or "function ->"."""
    missing = [field for field in getattr(value, "_fields", ()) if field not in value.__annotations__]
    for name, function in functions_of(value).items():
        signature = inspect.signature(function, follow_wrapped=False)
        parameters = list(signature.parameters.values())[1 if inspect.isclass(value) else 0 :]
        missing += [f"{name}({one.name})" for one in parameters if one.annotation is one.empty]
        missing += [f"{name} ->"] if signature.return_annotation is signature.empty else []
    return missing


@pytest.mark.parametrize("value", PUBLIC)
def test_a_public_signature_has_types(value):
    assert without_type(value) == []


def test_the_package_says_that_it_has_types():
    assert os.path.isfile(os.path.join(os.path.dirname(accum.__file__), "py.typed"))


@pytest.mark.tf("2.2")
def test_a_model_is_made_with_the_same_defaults_in_either_way():
    """What may be passed by position stands in both signatures."""
    model = accum.GradientAccumulateModel
    made, wrapped = (inspect.signature(function).parameters for function in (model.__init__, model.from_model))
    shared = [name for name in wrapped if name != "model"]
    assert len(shared) > 15 and "whole_batch" in shared
    for name in shared:
        assert (made[name].default, made[name].annotation) == (wrapped[name].default, wrapped[name].annotation), name


def keys_of(class_name, path):
    """The keys of a `TypedDict`, which exists for type checkers alone."""
    with open(path, encoding="utf-8") as file:
        nodes = ast.walk(ast.parse(file.read()))
    found = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == class_name]
    return {part.target.id for part in found[0].body if isinstance(part, ast.AnnAssign)}


@pytest.mark.tf("2.2")
def test_type_checkers_know_the_options_that_are_taken_by_name():
    of_optimizers = keys_of("OptimizerOptions", _plan.__file__)
    by_name = {one.name for one in inspect.signature(_plan.Plan.of).parameters.values() if one.kind is one.KEYWORD_ONLY}
    assert of_optimizers == by_name and set(_plan.Plan._fields) == of_optimizers | {"accum_steps", "reduction"}
    of_models = keys_of("OptionsByName", _options.__file__)
    by_position = inspect.signature(accum.GradientAccumulateModel.from_model).parameters.values()
    by_position = {one.name for one in by_position if one.kind is one.POSITIONAL_OR_KEYWORD}
    assert of_models | of_optimizers == set(_options.ModelOptions.NAMES) - by_position


def annotations_of(path):
    """(name, annotation) of each parameter, result and annotated variable in a source file."""
    with open(path, encoding="utf-8") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield f"{node.name} ->", node.returns
        elif isinstance(node, ast.AnnAssign):
            yield ast.dump(node.target), node.annotation


def is_any(annotation):
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


@pytest.mark.slow
@pytest.mark.parametrize("package", ["_engine", "_keras"])
def test_few_annotations_leave_the_type_open(package):
    """What really can be anything has a name in `accum._tf` that says what it is."""
    root = os.path.join(os.path.dirname(accum.__file__), package)
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names if name.endswith(".py")]
    annotations = [pair for path in sorted(files) for pair in annotations_of(path)]
    open_ones = [name for name, annotation in annotations if is_any(annotation)]
    assert len(annotations) > 1000
    assert len(open_ones) <= 0.05 * len(annotations), open_ones
