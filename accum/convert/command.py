"""`python -m accum convert`: from file to file."""

import importlib
import json
import os
import sys

from accum import _tf
from accum._tf import tf
from accum._words import in_a_line
from accum.convert import _v1
from accum.convert._conversion import from_v1, to_v1
from accum.convert._keras import KerasRun
from accum.convert._report import ConversionError, Disagreement


def perform(arguments):
    """Convert; returns the exit status."""
    try:
        if not _tf.CONVERTS:
            raise ConversionError("it needs Keras 2: TensorFlow 2.2 to 2.15, or tf-keras after.")
        model, optimizer = _made_by(arguments.model)
        convert = _from_v1 if arguments.direction == "from-v1" else _to_v1
        print(convert(arguments, model, optimizer, _names(arguments.names)))
        print("Nothing was written." if arguments.dry_run else "Written to {}.".format(arguments.target))
        return 0
    except (ConversionError, OSError) as error:
        print("python -m accum convert: {}".format(error), file=sys.stderr)
        return 1 if isinstance(error, Disagreement) else 2
    except Exception as error:  # such as of a disk, or of whatever the user's function returned
        print("python -m accum convert: {}.".format(in_a_line(error)), file=sys.stderr)
        return 2


def _options(arguments):
    names = ("epsilon", "micro_batch_weight", "optimizer_name", "accum_name", "dry_run")
    return dict({name: getattr(arguments, name) for name in names}, strict=not arguments.lenient)


def _from_v1(arguments, model, optimizer, names):
    _v1.check_target(arguments.target, arguments.overwrite)
    options = dict(_options(arguments), iterations=arguments.iterations, ignore=arguments.ignore)
    report = from_v1(arguments.source, model, optimizer, names, **options)
    if not arguments.dry_run:
        tf.train.Checkpoint(model=model, optimizer=optimizer).write(os.path.abspath(arguments.target))
    return report


def _to_v1(arguments, model, optimizer, names):
    _restore(arguments.source, model, optimizer)
    options = dict(_options(arguments), like=arguments.like, overwrite=arguments.overwrite)
    return to_v1(model, arguments.target, optimizer, names, **options)


def _restore(path, model, optimizer):
    """Restore a whole run: everything that the model and the optimizer have must be there."""
    path = (tf.train.latest_checkpoint(path) if os.path.isdir(path) else path) or path
    try:
        saved = [name for name, _ in tf.train.list_variables(path)]
        if "_CHECKPOINTABLE_OBJECT_GRAPH" not in saved:
            raise ConversionError("it is of no `tf.train.Checkpoint`.")
        KerasRun(model, optimizer).build_for([name.partition("optimizer/")[2] for name in saved])
        status = _tf.read_checkpoint(tf.train.Checkpoint(model=model, optimizer=optimizer), path)
        status.assert_existing_objects_matched()
    except _v1.UNREADABLE + (AssertionError,) as error:
        words = str(error) if isinstance(error, ConversionError) else in_a_line(error) + "."
        raise ConversionError("{} can't be restored into the model and the optimizer: {}".format(path, words)) from None


def _made_by(said):
    """(model, optimizer) that the function `module:function` returns."""
    module, _, function = said.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConversionError("{} can't be called: {}.".format(said, in_a_line(error))) from error
    if not isinstance(made, tuple) or len(made) != 2:
        words = " ".join(repr(made).split())  # an array has lines
        raise ConversionError("{} must return (model, optimizer). Received: {}.".format(said, words))
    return made


def _names(path):
    if path is None:
        return None
    with open(path) as file:
        try:
            names = json.load(file)
        except (RecursionError, ValueError) as error:
            raise ConversionError("{} is no JSON: {}".format(path, error)) from None
    is_named = isinstance(names, dict) and all(value is None or isinstance(value, str) for value in names.values())
    if not is_named and not isinstance(names, list):
        raise ConversionError("{} must hold an object of names to names, or a list of names.".format(path))
    return names
