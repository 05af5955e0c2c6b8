"""What is said to keep examples apart does so, by TensorFlow's own kernels (law L21)."""

import numpy as np
import pytest
import tensorflow as tf
from row_cases import CASES, Batch, build, tensors_of

from accum import _tf
from accum._rows import ConstantBatchSize, Rows, analyse
from accum._rows._decisions import RULES

tf1 = tf.compat.v1
COUNT, CHANGED = 6, 2
PARTS = (slice(0, 2), slice(2, 3), slice(3, 6))
EXISTS = {}


def exists(kind):
    """Return whether this TensorFlow has an operation, whose kernels run on its processor."""
    if kind not in EXISTS:
        try:
            _tf.definitions.definition_of(tf.Graph(), kind)
            EXISTS[kind] = True
        except (KeyError, ValueError, TypeError, tf.errors.NotFoundError):
            EXISTS[kind] = False
    return EXISTS[kind]


CASES_HERE = [case for case in CASES if exists(case.kind)]


class Graph:
    """An operation in a graph of its own, with what is said of it.

    Args:
      case: a `Case`.
    """

    def __init__(self, case):
        self.graph = tf.Graph()
        with self.graph.as_default():
            tensors, batch = tensors_of(case)
            self.op = build(case.kind, tensors, case.attributes)
        self.inputs = [one for one, _ in batch]
        self.placeholders = [placeholder for _, placeholder in batch]
        rows = {placeholder.name: one.rows for one, placeholder in batch}
        self.analysis = analyse(self.graph, [self.op.name], rows)
        self.verdict = self.analysis.verdict(self.op.name)
        self.session = None

    def run(self, values):
        if self.session is None:
            with self.graph.as_default():
                self.session = _tf.graph_parts.plain_session()
        return self.session.run(list(self.op.outputs), dict(zip(self.placeholders, values)))

    def draw(self, seed=0):
        return [one.draw(COUNT, seed + index) for index, one in enumerate(self.inputs)]


def entries(rows, part, array):
    """Return the entries of some examples."""
    index = [slice(None)] * np.ndim(array)
    index[rows.axis] = slice(part.start * rows.per_example, part.stop * rows.per_example)
    return array[tuple(index)]


def with_other_example(one, value):
    """Return a batch of which one example differs."""
    value = value.copy()
    entries(one.rows, slice(CHANGED, CHANGED + 1), value)[...] = entries(one.rows, slice(0, 1), one.draw(COUNT, 77))
    return value


def bits(array):
    return [str(one) for one in array.ravel()] if array.dtype == object else np.ascontiguousarray(array).tobytes()


def in_parts(graph, values):
    """Return the outputs of an operation for parts of the batch."""
    return [graph.run([entries(one.rows, part, value) for one, value in zip(graph.inputs, values)]) for part in PARTS]


@pytest.mark.law("L21")
@pytest.mark.parametrize("case", CASES_HERE, ids=str)
def test_each_rule_says_where_the_examples_lie(case):
    graph = Graph(case)
    expected = "reduces" if case.how not in ("", "random") else "rows"
    outputs = [None if rows is None else Rows(*rows) for rows in case.outputs]
    assert graph.verdict is not None
    assert (graph.verdict.kind, graph.verdict.how, graph.verdict.outputs) == (expected, case.how, outputs)


def is_random(case):
    return case.how == "random"


@pytest.mark.law("L21")
@pytest.mark.parametrize("case", [case for case in CASES_HERE if not is_random(case)], ids=str)
def test_rows_of_other_examples_keep_their_bits_and_are_those_of_a_part(case):
    graph = Graph(case)
    if case.how == "moments":
        return  # its rows are behind the reduction
    values = graph.draw()
    before = graph.run(values)
    after = graph.run([with_other_example(one, value) for one, value in zip(graph.inputs, values)])
    parts = in_parts(graph, values)
    for index, rows in enumerate(graph.verdict.outputs):
        if rows is not None:
            for others in (slice(0, CHANGED), slice(CHANGED + 1, COUNT)):
                assert bits(entries(rows, others, before[index])) == bits(entries(rows, others, after[index]))
            joined = np.concatenate([part[index] for part in parts], axis=rows.axis)
            if joined.dtype == object:
                assert bits(joined) == bits(before[index])
            else:
                np.testing.assert_allclose(joined, before[index], rtol=2e-5, atol=2e-5)


COMBINED = {
    "sum": lambda parts, counts: sum(parts),
    "product": lambda parts, counts: sum(parts),
    "bincount": lambda parts, counts: sum(parts),
    "segment_sum": lambda parts, counts: sum(parts),
    "mean": lambda parts, counts: sum(part * count for part, count in zip(parts, counts)) / sum(counts),
    "max": lambda parts, counts: np.max(parts, axis=0),
    "min": lambda parts, counts: np.min(parts, axis=0),
    "prod": lambda parts, counts: np.prod(parts, axis=0),
    "segment_max": lambda parts, counts: np.max(parts, axis=0),
    "segment_min": lambda parts, counts: np.min(parts, axis=0),
    "segment_prod": lambda parts, counts: np.prod(parts, axis=0),
    "all": lambda parts, counts: np.all(parts, axis=0),
    "any": lambda parts, counts: np.any(parts, axis=0),
    "euclidean_norm": lambda parts, counts: np.sqrt(np.sum(np.square(parts), axis=0)),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("case", [case for case in CASES_HERE if case.how in COMBINED], ids=str)
def test_the_parts_of_a_reduction_combine_to_the_whole(case):
    graph = Graph(case)
    values = graph.draw()
    whole, parts = graph.run(values), in_parts(graph, values)
    counts = [part.stop - part.start for part in PARTS]
    for index, rows in enumerate(graph.verdict.outputs):
        if rows is None and not (case.kind.startswith("FusedBatchNormGrad") and index > 2):
            combined = COMBINED[case.how]([part[index] for part in parts], counts)
            np.testing.assert_allclose(combined, whole[index], rtol=2e-5, atol=2e-5)


ELSEWHERE = {
    "BatchToSpace",
    "BatchToSpaceND",
    "CudnnRNNV3",
    "ResourceGather",
    "ResourceGatherNd",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
}
"""Types of operations that need a GPU, a variable, a table or another one's layout: they have tests of their own."""


def test_every_rule_has_a_case():
    assert set(RULES) - {case.kind for case in CASES} <= ELSEWHERE


def verdict_of(build_it, *batch):
    """Return what is said of the last operation that a function of tensors creates."""
    with tf.Graph().as_default() as graph:
        placeholders = [one.placeholder() for one in batch]
        output = build_it(*placeholders)
        rows = {placeholder.name: one.rows for one, placeholder in zip(batch, placeholders)}
        analysis = analyse(graph, [output.op.name], rows)
        return analysis.verdict(output.op.name)


B3 = Batch(("B", 3))
MEETING = {
    "softmax over the examples": lambda x: tf.nn.softmax(tf.transpose(x)),
    "roll": lambda x: tf.roll(x, 1, 0),
    "all pairs": lambda x: tf.matmul(x, x, transpose_b=True),
    "all differences": lambda x: x[:, tf.newaxis] - x[tf.newaxis],
    "running sum": lambda x: tf.cumsum(x, 0),
    "reverse": lambda x: tf.reverse(x, [0]),
    "sort": lambda x: tf.nn.top_k(tf.transpose(x), 1)[0],
    "argmax": lambda x: tf.argmax(x, 0),
    "first example": lambda x: x[0],
    "all but the first": lambda x: x[1:],
    "two first": lambda x: tf.slice(x, [0, 0], [2, 3]),
    "some examples": lambda x: tf.gather(x, [0, 1]),
    "reshape that mixes": lambda x: tf.reshape(x, [3, -1]),
    "reshape of a pair": lambda x: tf.reshape(x, [-1, 2, 3]),
    "flat": lambda x: tf.reshape(tf.transpose(x), [-1, 3]),
    "reshape of nothing": lambda x: tf.reshape(tf.transpose(x)[:0], tf.stack([0, tf.shape(x)[0], 2])),
    "squeeze": lambda x: tf.squeeze(x[:, :1]),
    "positions": lambda x: tf.range(tf.shape(x)[0]),
    "tile by the number": lambda x: tf.tile(x, [1, tf.shape(x)[0]]),
    "a matrix of the number": lambda x: tf.eye(tf.shape(x)[0]),
    "at least five": lambda x: tf.zeros([tf.maximum(tf.shape(x)[0], 5)]),
    "two different axes": lambda x: x[:, tf.newaxis, :1] * tf.transpose(x[:, :1])[:, :, tf.newaxis],
    "diagonal": lambda x: tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True)),
    "padding": lambda x: tf.pad(x, [[0, 1], [0, 0]]),
    "boolean mask": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "unique": lambda x: tf.unique(tf.cast(x[:, 0], tf.int32))[0],
    "halves": lambda x: tf.split(x, 2)[0],
    "shuffle": lambda x: tf1.random_shuffle(x),
    "python": lambda x: tf1.py_func(lambda value: value, [x], tf.float32),
    "joined examples": lambda x: tf.concat([x, x], 0)[:1],
    "batch dims of others": lambda x: tf.gather(x, tf.cast(x[:, 0], tf.int32)),
    "a vector of unknown length": lambda x: x * tf1.placeholder(tf.float32, [None, 3]),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("name", MEETING)
def test_what_lets_examples_meet_is_found(name):
    verdict = verdict_of(MEETING[name], B3)
    assert verdict.kind in ("meets", "behind")
    assert verdict.outputs == [None] * len(verdict.outputs)


@pytest.mark.law("L21")
def test_a_mean_that_is_subtracted_leaves_rows_behind_a_reduction():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 3])
        mean = tf.reduce_mean(x, 0)
        centred = x - mean
        variance = tf.reduce_mean(tf.square(centred), 0)
        normal = centred / tf.sqrt(variance)
        analysis = analyse(graph, [normal.op.name], {x.name: Rows(0, 1)})
    assert analysis.reduces == [mean.op.name, variance.op.name]
    assert [analysis.level(one.name) for one in (x, mean, centred, variance, normal)] == [0, 1, 1, 2, 2]
    assert analysis.rows(normal.name) == Rows(0, 1)


@pytest.mark.law("L21")
@pytest.mark.parametrize(
    "build_it",
    [
        lambda x: tf.concat([x, tf.zeros([64, 1])], 1),
        lambda x: tf.reshape(x, [64, 3]),
        lambda x: x + tf.zeros([64, 3]),
    ],
    ids=["state", "reshape", "zeros"],
)
def test_a_constant_number_of_examples_is_named(build_it):
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 3])
        with tf1.name_scope("here"):
            y = build_it(x)
        with pytest.raises(ConstantBatchSize, match="here/") as raised:
            analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert raised.value.operation.startswith("here/")


@pytest.mark.law("L21")
def test_a_shape_is_that_of_a_part_and_any_other_number_is_that_of_the_batch():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 6])
        count = tf.shape(x)[0]
        y = tf.reshape(x, tf.stack([count, 2, 3]))
        z = y / tf.cast(count, tf.float32)
        analysis = analyse(graph, [z.op.name], {x.name: Rows(0, 1)})
    assert analysis.is_size(count.name) and analysis.is_size(y.op.inputs[1].name)
    assert analysis.shapes_only(y.op.name, 1)
    assert not analysis.shapes_only(z.op.name, 1)
    assert analysis.rows(z.name) == Rows(0, 1)


SIZES_THAT_MAY_DIFFER = {
    "equal": lambda n: tf.equal(n, 22),
    "a multiple is equal": lambda n: tf.equal(6 * n, 132),
    "another number is equal": lambda n: tf.equal(n - 20, 2),
    "not equal": lambda n: tf.not_equal(n, 22),
    "between": lambda n: tf.logical_and(n > 10, n < 30),
    "near": lambda n: tf.abs(n - 22) < 1,
    "at most thousands": lambda n: tf.minimum(n, 5000) / n,
    "nearer": lambda n: tf.maximum(0, 3 - tf.abs(n - 22)),
    "more than thousands": lambda n: n > 5000,
    "more than thousands and a half": lambda n: tf.cast(n, tf.float32) > 5000.5,
    "chosen": lambda n: tf.where(tf.equal(n, 22), 1.0, 0.3),
    "as a number": lambda n: 1.0 - tf.cast(tf.equal(n, 22), tf.float32),
}
SAME_SIZES = {
    "more than none": lambda n: n > 0,
    "at least one": lambda n: n >= 1,
    "as many": lambda n: tf.equal(2 * n, 2 * n),
    "as many and as long": lambda n: tf.reduce_all(tf.equal(tf.stack([n, 6]), tf.stack([n, 6]))),
    "none": lambda n: tf.equal(n, 0),
    "never": lambda n: tf.equal(6 * n, 4),
    "their share": lambda n: (6 * n) // n,
    "not none": lambda n: tf.maximum(n, 1) // n,
    "numbers of images": lambda n: n * 2000 * 2000 // n,
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("name", [*SIZES_THAT_MAY_DIFFER, *SAME_SIZES])
def test_a_number_that_another_size_of_the_batch_may_change_is_found(name):
    """A comparison with a constant may have another result for some size that nobody has tried."""
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 6])
        size = {**SIZES_THAT_MAY_DIFFER, **SAME_SIZES}[name](tf.shape(x)[0])
        y = x * tf.cast(size, tf.float32)
        analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.is_count(size.name) == (name in SIZES_THAT_MAY_DIFFER)
    assert (y.op.name in analysis.counting) == (name in SIZES_THAT_MAY_DIFFER)


@pytest.mark.law("L21")
def test_a_length_of_rows_that_a_comparison_has_changed_is_none_of_the_examples():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, None])
        y = x * tf.where(tf.equal(tf.shape(x)[0], 22), 1.0, 0.3)
        z = y / tf.cast(tf.shape(y)[1], tf.float32)
        analysis = analyse(graph, [z.op.name], {x.name: Rows(0, 1)})
    assert analysis.counting == [y.op.name]


@pytest.mark.law("L21")
@pytest.mark.parametrize("most", [10, 5000, 10**6])
def test_the_first_examples_are_not_all_of_a_larger_batch(most):
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 6])
        y = 2.0 * x[: tf.minimum(tf.shape(x)[0], most)]
        analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(y.name) != Rows(0, 1) or analysis.level(y.name) == 1


@pytest.mark.law("L21")
def test_how_many_of_the_largest_there_are_is_another_number_for_a_small_batch():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 50])
        fixed, limited = (tf.shape(tf.nn.top_k(x, k)[0])[1] for k in (6, tf.minimum(6, tf.shape(x)[0])))
        analysis = analyse(graph, [fixed.op.name, limited.op.name], {x.name: Rows(0, 1)})
    assert analysis.is_count(limited.name) and not analysis.is_count(fixed.name)


@pytest.mark.law("L21")
def test_what_a_function_is_given_without_a_rank_is_no_scalar():
    tensors = tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec(None, tf.float32)
    concrete = tf.function(lambda x, other: x * other).get_concrete_function(*tensors)
    (x, _), (output,) = concrete.graph.inputs, concrete.graph.outputs
    analysis = analyse(concrete.graph, [output.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(output.name) is None and not analysis.scalars


@pytest.mark.law("L21")
def test_statistics_that_a_normalisation_is_given_and_returns_are_those_of_the_batch():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 4, 4, 2])
        mean = tf.reduce_mean(x, [0, 1, 2])
        of_batch, of_all = (
            tf1.nn.fused_batch_norm(x, mean, mean, mean=one, variance=tf.ones([2]), is_training=False)[1]
            for one in (mean, tf.zeros([2]))
        )
        analysis = analyse(graph, [of_batch.op.name, of_all.op.name], {x.name: Rows(0, 1)})
    assert analysis.depends(of_batch.name) and not analysis.depends(of_all.name)


@pytest.mark.law("L21")
def test_a_function_from_a_file_without_default_attributes_normalises_as_in_training():
    function = tf.function(lambda x: tf1.nn.fused_batch_norm(x, tf.ones([2]), tf.zeros([2]), is_training=True)[0])
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 4, 4, 2], name="x")
        tf.identity(function(x), name="y")
    graph_def = graph.as_graph_def()
    for node in (node for one in graph_def.library.function for node in one.node_def):
        node.attr.pop("is_training", None)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        analysis = analyse(graph, ["y"], {"x:0": Rows(0, 1)})
    assert analysis.level("y:0") == 1 and analysis.reduces


@pytest.mark.law("L21")
def test_space_to_batch_and_back_keeps_rows():
    def dilated(x):
        block, edges = tf.constant([2, 2]), tf.zeros([2, 2], tf.int32)
        y = build("SpaceToBatchND", [x, block, edges], {}).outputs[0]
        y = tf.nn.conv2d(y, tf.ones([3, 3, 2, 2]), strides=[1, 1, 1, 1], padding="SAME")
        return build("BatchToSpaceND", [y, block, edges], {}).outputs[0]

    verdict = verdict_of(dilated, Batch(("B", 4, 4, 2)))
    assert (verdict.kind, verdict.outputs) == ("rows", [Rows(0, 1)])


def table_of_words(ids):
    keys, values = tf.constant([0, 1], tf.int32), tf.constant([5.0, 6.0])
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(initializer, -1.0).lookup(ids)


def table_of_vectors():
    return tf1.get_variable("table", [5, 3], use_resource=True)


def drawn(kind, *bounds, **attributes):
    def draw(ids):
        state = tf1.get_variable("state", [3], tf.int64, use_resource=True, initializer=tf1.zeros_initializer())
        return build(
            kind, [state.handle, tf.constant(1, tf.int64), tf.shape(ids), *map(tf.constant, bounds)], attributes
        ).outputs[0]

    return draw


IDS = Batch((2, "B"), "int")
STATES = {
    "ResourceGather": lambda ids: tf.nn.embedding_lookup(table_of_vectors(), ids),
    "ResourceGatherNd": lambda ids: tf.gather_nd(table_of_vectors(), ids[..., tf.newaxis]),
    "LookupTableFindV2": table_of_words,
    "StatefulUniform": drawn("StatefulUniform", dtype=tf.float32),
    "StatefulStandardNormalV2": drawn("StatefulStandardNormalV2", dtype=tf.float32),
    "StatefulTruncatedNormal": drawn("StatefulTruncatedNormal", dtype=tf.float32),
    "StatefulUniformFullInt": drawn("StatefulUniformFullInt", dtype=tf.int32),
    "StatefulUniformInt": drawn("StatefulUniformInt", np.int32(0), np.int32(9)),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("kind", [kind for kind in STATES if exists(kind)])
def test_entries_of_a_variable_or_table_are_those_of_their_examples(kind):
    verdict = verdict_of(lambda ids: tf.identity(STATES[kind](ids)), IDS)
    assert (verdict.kind, verdict.outputs) == ("rows", [Rows(1, 1)])


@pytest.mark.law("L21")
def test_a_variable_that_the_batch_has_changed_before_is_read_on_the_whole_batch():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 3])
        average = tf1.get_variable("average", [3], use_resource=True)
        with tf.control_dependencies([average.assign(tf.reduce_mean(x, 0))]):
            y = x - average.read_value()
        z = x - average
        analysis = analyse(graph, [y.op.name, z.op.name], {x.name: Rows(0, 1)})
    assert analysis.verdict(y.op.name).kind == "behind"
    assert analysis.verdict(z.op.name).kind == "rows"


@pytest.mark.law("L21")
@pytest.mark.parametrize("control_flow", [1, 2])
def test_the_length_of_a_loop_and_the_choice_of_a_branch_may_depend_on_other_examples(control_flow):
    with tf.Graph().as_default() as graph, _tf.graphs.control_flow_of_tf(control_flow):
        x, lengths = tf1.placeholder(tf.float32, [None, 3]), tf1.placeholder(tf.int32, [None])
        longest = tf.reduce_max(lengths)
        y = tf1.while_loop(lambda i, _: i < longest, lambda i, h: (i + 1, tf.tanh(h)), [tf.constant(0), x])[1]
        z = tf1.cond(longest > 3, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        w = x * z
        fixed = tf1.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [tf.constant(0), x])[1]
        analysis = analyse(
            graph, [one.op.name for one in (y, w, fixed)], {x.name: Rows(0, 1), lengths.name: Rows(0, 1)}
        )
    assert analysis.reduces == [longest.op.name]
    assert [analysis.rows(one.name) for one in (y, z, w, fixed)] == [Rows(0, 1), None, Rows(0, 1), Rows(0, 1)]
    assert [analysis.level(one.name) for one in (y, z, w, fixed)] == [1, 1, 1, 0]


@pytest.mark.law("L21")
@pytest.mark.parametrize("control_flow", [1, 2])
def test_what_meets_within_a_loop_meets_behind_it(control_flow):
    with tf.Graph().as_default() as graph, _tf.graphs.control_flow_of_tf(control_flow):
        x = tf1.placeholder(tf.float32, [None, 3])
        step = lambda i, h: (i + 1, tf.nn.softmax(h, 0))
        y = tf1.while_loop(lambda i, _: i < 3, step, [tf.constant(0), x])[1]
        analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(y.name) is None
    assert len(analysis.meets) >= 1


@pytest.mark.law("L21")
@pytest.mark.parametrize("control_flow", [1, 2])
def test_a_loop_over_the_examples_meets(control_flow):
    with tf.Graph().as_default() as graph, _tf.graphs.control_flow_of_tf(control_flow):
        x = tf1.placeholder(tf.float32, [None, 3])
        y = tf.map_fn(tf.nn.softmax, x)
        analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(y.name) is None


@pytest.mark.law("L21")
@pytest.mark.parametrize("side", [8, None])
def test_images_may_be_resized_to_a_size_that_is_computed_from_theirs(side):
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, side, side, 3])
        shape = tf.shape(x)
        larger = tf1.image.resize_nearest_neighbor(x, (shape[1] * 2, shape[2] * 2))
        y = tf.reshape(larger, [shape[0], shape[1] * 2, shape[2] * 2, 3, 1])
        analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(y.name) == Rows(0, 1) and not analysis.meets


@pytest.mark.law("L21")
def test_a_branch_for_one_time_step_alone_does_not_hide_what_is_before_it():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, None, 3])
        kept = tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], 3, 1])
        with _tf.graphs.control_flow_of_tf(1):
            is_one = tf.equal(tf.shape(x)[1], 1)
            y = tf1.cond(is_one, lambda: tf.squeeze(x, [1], name="one"), lambda: tf.reduce_sum(x, 1))
        analysis = analyse(graph, [kept.op.name, y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(kept.name) == Rows(0, 1)
    assert analysis.verdict("cond/one").kind == "meets" and analysis.rows(y.name) is None


def size_of(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


SCALARS = {
    "sum": (lambda x: tf.reduce_sum(x * x), "sum"),
    "sum of sums": (lambda x: 2.0 * tf.reduce_sum(x) - tf.nn.l2_loss(x), "sum"),
    "sums of features": (lambda x: tf.reduce_sum(tf.reduce_sum(x, 0)), "sum"),
    "sum and zero": (lambda x: 0.0 + 0.1 * tf.reduce_sum(x), "sum"),
    "mean": (lambda x: tf.reduce_mean(x), "mean"),
    "mean and a constant": (lambda x: 3.0 + tf.reduce_mean(x) / 4.0, "mean"),
    "sum by number": (lambda x: 0.1 * tf.reduce_sum(x) / (2.0 * size_of(x)), "mean"),
    "constant": (lambda x: tf.constant(2.0) * 3.0, "constant"),
    "sum and a constant": (lambda x: tf.reduce_sum(x) + 1.0, None),
    "sum and mean": (lambda x: tf.reduce_sum(x) + tf.reduce_mean(x), None),
    "square of a mean": (lambda x: tf.reduce_mean(x) ** 2.0, None),
    "product of means": (lambda x: tf.reduce_mean(x) * tf.reduce_mean(x), None),
    "largest": (lambda x: tf.reduce_max(x), None),
    "sum by a root": (lambda x: tf.reduce_sum(x) / tf.sqrt(size_of(x)), None),
    "sum by a sum": (lambda x: tf.reduce_sum(x * x) / tf.reduce_sum(x), None),
    "by a mean": (lambda x: 1.0 / tf.reduce_mean(x), None),
    "behind a mean": (lambda x: tf.reduce_mean(tf.abs(x - tf.reduce_mean(x))), None),
    "mean of what has met": (lambda x: tf.reduce_mean(x * tf.roll(x, 1, 0)), None),
    "by the number": (lambda x: size_of(x), None),
    "sum by at least 100": (lambda x: tf.reduce_sum(x) / tf.maximum(size_of(x), 100.0), None),
    "sum by whole pairs": (lambda x: tf.reduce_sum(x) / tf.floor(size_of(x) / 2.0), None),
    "mean of integers": (lambda x: tf.cast(tf.reduce_mean(tf.cast(100.0 * x, tf.int32)), tf.float32), None),
    "whole part of a sum": (lambda x: tf.cast(tf.cast(0.3 * tf.reduce_sum(x), tf.int32), tf.float32), None),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("name", SCALARS)
def test_how_parts_give_a_number_of_the_batch(name):
    """Also as NumPy finds, on a batch in two parts."""
    function, expected = SCALARS[name]
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [None, 3])
        value = tf.identity(function(x))
        analysis = analyse(graph, [value.op.name], {x.name: Rows(0, 1)})
        batch = np.random.RandomState(0).uniform(0.5, 2.0, (7, 3))
        whole, *parts = [session.run(value, {x: part}) for part in (batch, batch[:3], batch[3:])]
    assert analysis.combination(value.name) == expected
    is_sum, is_mean = np.allclose(sum(parts), whole), np.allclose(np.average(parts, weights=[3, 4]), whole)
    assert (is_sum, is_mean) == {"sum": (True, False), "mean": (False, True)}.get(expected, (is_sum, is_mean))
    by_luck = ("by the number", "sum by at least 100")  # which is a sum up to there
    assert expected is not None or not (is_mean or is_sum) or name in by_luck


@pytest.mark.law("L21")
def test_a_number_of_examples_among_them_is_found():
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, None, 3])
        taken, length = x * size_of(x), x * tf.cast(tf.shape(x)[1], tf.float32)
        shaped = x + tf.zeros([tf.shape(x)[0], 1, 1])
        analysis = analyse(graph, [taken.op.name, length.op.name, shaped.op.name], {x.name: Rows(0, 1)})
    assert analysis.counting == [taken.op.name]


def number_of_examples(x):
    return tf.shape(x)[0]


def by_chosen_length(x):
    time = tf.shape(x)[1]
    chosen = tf.cond(number_of_examples(x) > 5, lambda: time, lambda: 2 * time)
    return x * tf.cast(chosen, tf.float32)


def by_sum_of_ones(x):
    """The sum of a list with as many ones as there are examples."""
    count = number_of_examples(x)
    ones = tf.TensorArray(tf.float32, size=count, element_shape=[])
    _, ones = tf.while_loop(lambda i, _: i < count, lambda i, ones: (i + 1, ones.write(i, 1.0)), (0, ones))
    return x * tf.reduce_sum(ones.stack())


def at_most_ten(x):
    return tf.minimum(number_of_examples(x), 10)


def nearly_ten(x):
    """By an operation whose value only TensorFlow computes ahead."""
    return tf.cast(tf.round(10.0 * tf.tanh(tf.cast(number_of_examples(x), tf.float32) / 4.0)), tf.int32)


BY_NUMBER = {
    "a branch": lambda x: tf.cond(number_of_examples(x) > 5, lambda: 2.0 * x, lambda: x),
    "a length by branches": by_chosen_length,
    "a list of ones": by_sum_of_ones,
    "slice": lambda x: tf.reduce_sum(tf.slice(x, [0, 0, 0], [-1, -1, at_most_ten(x) // 4]), [1, 2]),
    "ones": lambda x: x[:, :, 0] * tf.reduce_sum(tf.ones([number_of_examples(x), at_most_ten(x)]), 1, keepdims=True),
    "tile": lambda x: tf.reduce_sum(tf.tile(x, [1, 1, at_most_ten(x)]), [1, 2]),
    "broadcast by a tanh": lambda x: tf.reduce_sum(
        tf.broadcast_to(x[:, :1, :1], [number_of_examples(x), 1, nearly_ten(x)]), 2
    ),
    "broadcast": lambda x: tf.reduce_sum(tf.broadcast_to(x[:, :1, :1], [number_of_examples(x), 1, at_most_ten(x)]), 2),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("name", BY_NUMBER)
def test_what_a_function_computes_by_the_number_of_examples_is_not_proven(name):
    """Also where large batches have the same: the results for a part differ."""
    spec = tf.TensorSpec([None, None, 3], tf.float32)
    concrete = tf.function(BY_NUMBER[name]).get_concrete_function(spec)  # which keeps its graph, in TensorFlow 1.15
    (x,), (output,) = concrete.graph.inputs, concrete.graph.outputs
    analysis = analyse(concrete.graph, [output.op.name], {x.name: Rows(0, 1)})
    assert analysis.counting or analysis.has_met(output.name)
    batch = np.random.RandomState(0).uniform(0.5, 2.0, (7, 2, 3))
    with tf.Graph().as_default(), tf1.Session() as session:
        whole, part = [BY_NUMBER[name](tf.constant(rows, tf.float32)) for rows in (batch, batch[:3])]
        whole, part = session.run([whole, part])
    assert not np.allclose(whole[:3], part)


@pytest.mark.law("L21")
def test_the_size_of_an_array_that_grows_may_be_the_number_of_examples():
    with tf.Graph().as_default() as graph, _tf.graphs.control_flow_of_tf(1):
        x = tf1.placeholder(tf.float32, [None, 3])
        array = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        loop = tf.constant(0), array
        _, filled = tf.while_loop(
            lambda index, _: index < tf.shape(x)[0], lambda index, held: (index + 1, held.write(index, 1.0)), loop
        )
        size = filled.size()
        y = x * tf.cast(size, tf.float32)
        analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(y.name) is None or analysis.is_count(size.name)


@pytest.mark.law("L21")
def test_unknown_lengths_of_two_tensors_are_the_same_only_where_an_operation_needs_it():
    """Otherwise `[-1, length]` would cut the examples of one tensor into pieces as long as those of the other."""
    with tf.Graph().as_default() as graph:
        x, y = tf1.placeholder(tf.float32, [None, None, 4]), tf1.placeholder(tf.float32, [None, None, 4])
        length = tf.shape(y)[1]
        pieces = tf.reshape(x, [-1, length, 4])
        total = x + y
        as_before = tf.reshape(total, [-1, length, 4])
        as_long = tf.reshape(x, [tf.shape(x)[0], length, 4])
        rows = {x.name: Rows(0, 1), y.name: Rows(0, 1)}
        found = [analyse(graph, [one.op.name], rows).rows(one.name) for one in (pieces, total, as_before, as_long)]
    assert found == [None, Rows(0, 1), Rows(0, 1), Rows(0, 1)]


@pytest.mark.parametrize("numbers, expected", [("same", Rows(0, 1)), ("own", None), ("rest", None)])
@pytest.mark.law("L21")
def test_texts_that_are_cut_to_the_same_number_of_words_have_the_same_length(numbers, expected):
    """As where words and characters are cut to the longest text; -1, the rest of an axis, is no such number."""
    with tf.Graph().as_default() as graph:
        words, letters = tf1.placeholder(tf.float32, [None, None, 4]), tf1.placeholder(tf.float32, [None, None, 4])
        longest, other = tf1.placeholder(tf.int32, []), tf1.placeholder(tf.int32, [])
        longest, other = {"same": [longest] * 2, "own": [longest, other], "rest": [tf.constant(-1)] * 2}[numbers]
        x = tf.slice(words, [0, 0, 0], tf.stack([tf.constant(-1), longest, tf.constant(4)]))
        y = tf.slice(letters, [0, 0, 0], tf.stack([tf.constant(-1), other, tf.constant(4)]))
        y = tf1.placeholder_with_default(y, [None, None, 4])
        pieces = tf.reshape(x, [-1, tf.shape(y)[1], 4])
        found = analyse(graph, [pieces.op.name], {x.name: Rows(0, 1), y.name: Rows(0, 1)})
    assert found.rows(pieces.name) == expected


@pytest.mark.tf("2.2", because="TensorFlow 1 passes no variables into loops")
@pytest.mark.law("L21")
def test_a_variable_that_is_read_in_a_loop_has_its_shape_there():
    """As the bias of a GRU of Keras 3, which it splits in each step."""
    bias = tf.Variable(tf.ones([2, 3]))

    @tf.function
    def steps(x):
        def step(state):
            one, other = (tf.squeeze(part, 0) for part in tf.split(bias, 2))
            return [tf.tanh(tf.matmul(state, tf.ones([3, 3])) + one) * other]

        return tf.while_loop(lambda state: True, step, [x], maximum_iterations=4)[0]

    graph = steps.get_concrete_function(tf.TensorSpec([None, 3])).graph
    (y,), x = graph.outputs, graph.inputs[0]
    analysis = analyse(graph, [y.op.name], {x.name: Rows(0, 1)})
    assert analysis.rows(y.name) == Rows(0, 1) and not analysis.meets


def recurrent(axis=1, mode="lstm", dropout=0.0, lengths=None):
    """Return a function of sequences that creates the operation of a recurrent layer on a GPU, which has its kernel."""

    def build_it(x):
        count = tf.shape(x)[axis]
        shape = [1, count, 4] if axis else [count, 1, 4]
        state = tf.zeros(shape)
        return tf.raw_ops.CudnnRNNV3(
            input=x,
            input_h=state,
            input_c=state if mode == "lstm" else tf.constant(0.0),
            params=tf.zeros([200]),
            sequence_lengths=tf.fill([count], 5) if lengths is None else lengths,
            rnn_mode=mode,
            time_major=bool(axis),
            dropout=dropout,
        )[0]

    return build_it


@pytest.mark.tf("2.2", because="`tf.raw_ops` of TensorFlow 1 lacks it")
@pytest.mark.law("L21")
@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_recurrent_layer_on_a_gpu_keeps_examples_apart(axis, mode):
    verdict = verdict_of(recurrent(axis, mode), Batch((5, "B", 3) if axis else ("B", 5, 3)))
    assert verdict.kind == "rows" and verdict.outputs[0] == Rows(axis, 1)


@pytest.mark.tf("2.2", because="`tf.raw_ops` of TensorFlow 1 lacks it")
@pytest.mark.law("L21")
@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"lengths": [5, 5]}])
def test_a_recurrent_layer_on_a_gpu_that_draws_or_has_lengths_for_a_fixed_number_of_examples_does_not(options):
    assert verdict_of(recurrent(**options), Batch((5, "B", 3))).kind == "meets"
