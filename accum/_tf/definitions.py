"""The definitions of operation types: what they are called with, and what they return."""

from typing import Any, Dict, List

from accum._tf.version import tf


def definition_of(graph: tf.Graph, kind: str) -> Any:
    """Return the `OpDef` of a type of operation, or of a function of the graph; there is no public name."""
    find = getattr(graph, "op_def_for_type", None) or graph._get_op_def  # the latter dies with 2.10
    return find(kind)


def with_defaults(definition: Any, node: Any) -> Any:
    """Return a `NodeDef` with all attributes that it has by default, which functions in a file may lack."""
    lacking = [one for one in definition.attr if one.HasField("default_value") and one.name not in node.attr]
    if not lacking:
        return node
    filled = tf.compat.v1.NodeDef()
    filled.CopyFrom(node)
    for one in lacking:
        filled.attr[one.name].CopyFrom(one.default_value)
    return filled


def output_types(definition: Any, node: Any) -> List[int]:
    """Return the dtypes, as enums, of the outputs of a `NodeDef`; that of a ref variable is a ref type, above 100."""
    return [dtype for argument in definition.output_arg for dtype in argument_types(argument, node)]


def first_outputs(definition: Any, node: Any) -> Dict[str, int]:
    """Return {name of an output: the index of its first tensor} of a `NodeDef`."""
    firsts, count = {}, 0
    for argument in definition.output_arg:
        firsts[argument.name] = count
        count += len(argument_types(argument, node))
    return firsts


def argument_types(argument: Any, node: Any) -> List[int]:
    """Return the dtypes of the tensors that one argument of a definition stands for."""
    if argument.type_list_attr:
        return list(node.attr[argument.type_list_attr].list.type)
    dtype = node.attr[argument.type_attr].type if argument.type_attr else argument.type
    count = node.attr[argument.number_attr].i if argument.number_attr else 1
    return [dtype + 100 if argument.is_ref else dtype] * count
