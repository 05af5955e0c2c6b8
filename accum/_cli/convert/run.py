"""Carry out `python -m accum convert`: read one checkpoint and write the other."""

import json
import os
import sys

from accum import _tf
from accum._cli import named_function
from accum._cli.error_text import one_line
from accum._migrate import pipes
from accum._tf import tf
from accum.convert import _v1
from accum.convert._conversion import from_v1, to_v1
from accum.convert._keras import KerasRun
from accum.convert._report import ConversionError, Disagreement


def perform(arguments):
    """Convert. Returns the exit status."""
    try:
        if not _tf.optimizer_state.CONVERTS:
            raise ConversionError("conversion needs Keras: TensorFlow 2.2 or later.")
        model, optimizer = _made_by(arguments.model)
        convert = _from_v1 if arguments.direction == "from-v1" else _to_v1
        print(convert(arguments, model, optimizer, _names(arguments.names)))
        print("Nothing was written." if arguments.dry_run else f"Written to {arguments.target}.")
        return 0
    except (ConversionError, OSError) as error:
        if isinstance(error, OSError) and pipes.is_reader_gone(error):
            raise  # of standard output; the command line handles it
        print(f"python -m accum convert: {error}", file=sys.stderr)
        _write_proposal(arguments.proposal, getattr(error, "proposal", None))
        return 1 if isinstance(error, Disagreement) else 2
    except Exception as error:  # from the disk, or from what the user's function returned
        print(f"python -m accum convert: {one_line(error)}.", file=sys.stderr)
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
    """Restore a complete run: the checkpoint must hold every variable of the model and the optimizer."""
    path = (tf.train.latest_checkpoint(path) if os.path.isdir(path) else path) or path
    try:
        saved = [name for name, _ in tf.train.list_variables(path)]
        if "_CHECKPOINTABLE_OBJECT_GRAPH" not in saved:
            raise ConversionError("it was not written by `tf.train.Checkpoint`.")
        KerasRun(model, optimizer).build_for([name.partition("optimizer/")[2] for name in saved])
        status = _tf.tracking.read_checkpoint(tf.train.Checkpoint(model=model, optimizer=optimizer), path)
        status.assert_existing_objects_matched()
    except _v1.UNREADABLE + (AssertionError,) as error:
        words = str(error) if isinstance(error, ConversionError) else one_line(error) + "."
        raise ConversionError(f"{path} can't be restored into the model and the optimizer: {words}") from None


def _made_by(said):
    """Returns the (model, optimizer) that the function `module:function` returns."""
    module, function = named_function.split(said)
    try:
        made = getattr(named_function.module_of(module), function)()
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConversionError(f"{said} can't be called: {one_line(error)}.") from error
    if not isinstance(made, tuple) or len(made) != 2:
        words = " ".join(repr(made).split())  # the repr of an array has several lines
        raise ConversionError(f"{said} must return (model, optimizer). Received: {words}.")
    return made


def _write_proposal(path, proposal):
    """Write the proposal of an error to the file that the user gave, if there are both."""
    if path is None or proposal is None:
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump(proposal, file, indent=2)
            file.write("\n")
    except OSError as error:
        print(f"python -m accum convert: the proposal was not written: {one_line(error)}.", file=sys.stderr)
    else:
        print(f"The proposal is in {path}. Check it, and pass --names {path}.", file=sys.stderr)


def _names(path):
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        try:
            names = json.load(file)
        except (RecursionError, ValueError) as error:
            raise ConversionError(f"{path} is not JSON: {error}") from None
    is_named = isinstance(names, dict) and all(value is None or isinstance(value, str) for value in names.values())
    if not is_named and not isinstance(names, list):
        raise ConversionError(f"{path} must hold a JSON object that maps names to names, or a list of names.")
    return names
