"""Losses with denominators of their own, such as masked words and sentences, over the micro-batches of a cycle (L2)."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from optimizers import mainly

import accum.compat.v1

tf1 = tf.compat.v1

GUIDE = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, "docs", "tensorflow-1.md")
K, STEPS, ROWS, LENGTH, WORDS = 3, 3, 6, 4, 7
RANDOM = np.random.RandomState(0)
IDS = RANDOM.randint(0, WORDS, size=(STEPS, ROWS, LENGTH))
MASK = (RANDOM.uniform(size=(STEPS, ROWS, LENGTH)) < 0.4).astype("float32")
MASK[:, 2:4] = 0.0  # no masked word in the second micro-batch
LABELS = RANDOM.normal(size=(STEPS, ROWS)).astype("float32")
PARTS = [slice(0, 2), slice(2, 4), slice(4, 6)]
FULL = list(zip(IDS, MASK, LABELS))
MICRO = [tuple(array[part] for array in batch) for batch in FULL for part in PARTS]


class Pretraining:
    """A model with a loss over masked words, one over sentences, and, if asked for, one over all words."""

    def __init__(self, use_resource=True, is_sparse=True):
        self.ids = tf1.placeholder(tf.int64, [None, LENGTH])
        self.mask, self.labels = tf1.placeholder(tf.float32, [None, LENGTH]), tf1.placeholder(tf.float32, [None])
        first = np.random.RandomState(1)
        get = lambda name, shape: tf1.get_variable(
            name, initializer=first.normal(size=shape).astype("float32"), use_resource=use_resource
        )
        self.table, self.head, self.unused = get("table", (WORDS, 2)), get("head", (2,)), get("unused", (2,))
        table = self.table if is_sparse else tf.identity(self.table)
        vectors = tf.nn.embedding_lookup(table, self.ids)
        self.masked, self.sentences = tf.reduce_sum(self.mask), tf.shape(self.ids)[0]
        errors = tf.reduce_sum((vectors - 1.0) ** 2, -1) * self.mask
        self.words = tf.reduce_sum(errors) / (self.masked + 1e-20)
        pooled = tf.linalg.matvec(tf.reduce_mean(vectors, 1), self.head)
        self.order = tf.reduce_mean((pooled - self.labels) ** 2)
        self.variables = [self.table, self.head]

    def feed(self, batch):
        return dict(zip((self.ids, self.mask, self.labels), batch))

    def train(self, train_op, batches, last=(), saver=None, path=None):
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            if path and saver is None:
                tf1.train.Saver().restore(session, path)
            for batch in batches:
                session.run(train_op, self.feed(batch))
            session.run(list(last))
            if saver is not None:
                saver.save(session, path)
            return session.run(self.variables)


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def plain(batches=FULL, **options):
    """What plain training on full batches ends with."""
    with tf.Graph().as_default():
        model = Pretraining(**options)
        return model.train(momentum().minimize(model.words + model.order), batches)


def accumulated(accum_steps):
    return accum.compat.v1.AccumOptimizer(momentum(), accum_steps)


def accumulating(model, **options):
    optimizer = accum.compat.v1.AccumOptimizer(momentum(), K, **options)
    losses, counts = [model.words, model.order], [model.masked, model.sentences]
    return optimizer, losses, counts


@pytest.mark.law("L2")
@pytest.mark.parametrize("use_resource", mainly([False, True], True), ids=["ref", "resource"])
@pytest.mark.parametrize("is_sparse", mainly([False, True], False), ids=["dense", "sparse"])
def test_each_loss_has_the_denominator_of_the_full_batch(is_sparse, use_resource):
    with tf.Graph().as_default():
        model = Pretraining(use_resource, is_sparse)
        optimizer, losses, counts = accumulating(model)
        ours = model.train(optimizer.minimize(losses, weight=counts), MICRO)
    assert_near(ours, plain(is_sparse=is_sparse))


@pytest.mark.slow
@pytest.mark.law("L2", "L8")
@pytest.mark.parametrize("order", [1, -1])
def test_each_loss_may_look_up_rows_of_its_own(order):
    """Momentum moves only the rows that a step has, so each must have those of all losses."""

    def train(wrap, batches):
        with tf.Graph().as_default(), tf1.Session() as session:
            ids = [tf1.placeholder(tf.int64, [None]) for _ in range(2)]
            table = tf1.get_variable("table", initializer=np.ones((6, 2), "float32"))
            losses = [tf.reduce_mean(tf.nn.embedding_lookup(table, one) ** 2) for one in ids]
            train_op = wrap(losses[::order], [tf.size(one) for one in ids][::order])
            session.run(tf1.global_variables_initializer())
            for batch in batches:
                session.run(train_op, dict(zip(ids, batch)))
            return session.run([table])

    parts = [([0, 0], [1]), ([2], [1, 3, 3]), ([0], [3]), ([2, 4], [5])]
    full = [tuple(sum(lists, []) for lists in zip(*parts[start : start + 2])) for start in (0, 2)]
    ours = train(lambda losses, counts: accumulated(2).minimize(losses, weight=counts), parts)
    assert_near(ours, train(lambda losses, counts: momentum().minimize(tf.add_n(losses)), full))


def largest_difference(ours, theirs):
    return max(np.abs(one - other).max() for one, other in zip(ours, theirs))


@pytest.mark.slow
@pytest.mark.law("L2")
@pytest.mark.parametrize("of, words", [("sentences", "sentences"), ("masked", "masked words")])
def test_one_count_for_both_losses_ends_as_far_off_as_the_guide_says(of, words):
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, _ = accumulating(model)
        train_op = optimizer.minimize(tf.add_n(losses), weight=getattr(model, of))
        ours = model.train(train_op, MICRO[:K])
    full = plain(FULL[:1])
    with open(GUIDE, encoding="utf-8") as file:
        said = " ".join(file.read().split())
    assert f"a step moves a weight by up to {largest_difference(plain([]), full):.2f}." in said
    off = largest_difference(ours, full)
    assert re.search(rf"[Ww]eighted by {words},( it is off)? by {off:.2f}\b", said)


@pytest.mark.slow
@pytest.mark.law("L2")
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_loss_without_elements_in_a_whole_cycle_leaves_the_others(is_swapped):
    batches = [(ids, np.zeros_like(mask), labels) for ids, mask, labels in FULL]
    micro = [tuple(array[part] for array in batch) for batch in batches for part in PARTS]
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        order = -1 if is_swapped else 1
        ours = model.train(optimizer.minimize(losses[::order], weight=counts[::order]), micro)
    assert_near(ours, plain(batches))


@pytest.mark.slow
@pytest.mark.law("L2", "L6")
@pytest.mark.parametrize("form", ["flush", "separate ops"])
def test_an_unfinished_cycle_is_applied_by_the_counts_so_far(form):
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        optimizer = accum.compat.v1.AccumOptimizer(momentum(), 100)
        if form == "flush":
            run = optimizer.minimize(losses, weight=counts)
            last = [optimizer.flush()]
        else:
            ops = optimizer.accumulation_ops(losses, weight=counts)
            run, last = ops.accumulate, [ops.apply]
        ours = model.train(run, MICRO[:K], last)
    assert_near(ours, plain(FULL[:1]))


@pytest.mark.slow
@pytest.mark.law("L7")
def test_a_transform_sees_the_sum_of_all_losses():
    def clip(grads_and_vars):
        grads, variables = zip(*[(tf.convert_to_tensor(grad), var) for grad, var in grads_and_vars])
        return list(zip(tf.clip_by_global_norm(grads, 0.1)[0], variables))

    with tf.Graph().as_default():
        model = Pretraining(is_sparse=False)
        optimizer, losses, counts = accumulating(model, transform=clip)
        ours = model.train(optimizer.minimize(losses, weight=counts), MICRO)
    with tf.Graph().as_default():
        model = Pretraining(is_sparse=False)
        pairs = [pair for pair in momentum().compute_gradients(model.words + model.order) if pair[0] is not None]
        theirs = model.train(momentum().apply_gradients(clip(pairs)), FULL)
    assert_near(ours, theirs)


@pytest.mark.slow
@pytest.mark.law("L11")
def test_a_run_that_is_killed_in_mid_cycle_continues_with_the_same_bits(tmp_path):
    def train(batches, saves=False, path=None):
        with tf.Graph().as_default():
            model = Pretraining()
            optimizer, losses, counts = accumulating(model)
            train_op = optimizer.minimize(losses, weight=counts)
            saver = tf1.train.Saver() if saves else None
            return model.train(train_op, batches, saver=saver, path=path)

    path = str(tmp_path / "at")
    train(MICRO[: K + 2], True, path)
    assert_identical(train(MICRO[K + 2 :], path=path), train(MICRO))


@pytest.mark.slow
@pytest.mark.law("L11")
def test_a_checkpoint_of_one_loss_starts_the_accumulators_of_the_others(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        model = Pretraining()
        optimizer = accum.compat.v1.AccumOptimizer(momentum(), K)
        optimizer.minimize(model.words)
        session.run(tf1.global_variables_initializer())
        path = tf1.train.Saver([*optimizer.variables(), *tf1.trainable_variables()]).save(session, str(tmp_path / "at"))
    with tf.Graph().as_default(), tf1.Session() as session:
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        train_op = optimizer.minimize(losses[::-1], weight=counts[::-1], var_list=[model.table])
        accum.compat.v1.Saver(optimizer).restore(session, path)
        session.run(train_op, model.feed(MICRO[0]))


@pytest.mark.slow
@pytest.mark.law("L14")
def test_without_accumulation_it_is_plain_training():
    with tf.Graph().as_default():
        model = Pretraining()
        _, losses, counts = accumulating(model)
        optimizer = accum.compat.v1.AccumOptimizer(momentum(), 1)
        ours = model.train(optimizer.minimize(losses, weight=counts), FULL)
    assert_near(ours, plain())


@pytest.mark.slow
@pytest.mark.law("L2")
def test_the_loss_of_the_full_batch_is_the_sum_of_means_with_the_same_counts():
    with tf.Graph().as_default(), tf1.Session() as session:
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        mean = tf.add_n([optimizer.mean_over_cycle(loss, count) for loss, count in zip(losses, counts)])
        train_op = optimizer.minimize(losses, weight=counts)
        session.run(tf1.global_variables_initializer())
        expected = session.run(tf.add_n(losses), model.feed(FULL[0]))
        seen = [session.run([mean, train_op], model.feed(batch))[0] for batch in MICRO[:K]]
    np.testing.assert_allclose(seen[-1], expected, rtol=2e-6)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options, weight_of, message",
    [
        ({}, lambda counts: None, "Several losses need `weight`: a list with the number of elements"),
        ({}, lambda counts: counts[:1], "Several losses need `weight`"),
        ({}, lambda counts: counts[0], "Several losses need `weight`"),
        ({}, lambda counts: [-1.0, 1.0], "weight"),
        ({"reduction": "sum"}, list, '`reduction="mean"`'),
        ({"reduction": "running_mean"}, list, '`reduction="mean"`'),
        ({"nonfinite": "skip_micro"}, list, '`nonfinite="propagate"`'),
    ],
)
def test_several_losses_that_are_not_exact_are_refused(options, weight_of, message):
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, counts = accumulating(model, **options)
        with pytest.raises(ValueError, match=message):
            optimizer.minimize(losses, weight=weight_of(counts))


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_weight_for_all_losses_together_is_refused():
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        with pytest.raises(ValueError, match="each has its own count"), optimizer.weighing(model.sentences):
            optimizer.minimize(losses, weight=counts)
        optimizer, _, _ = accumulating(model)
        optimizer.mean_over_cycle(model.words)
        with pytest.raises(ValueError, match="each has its own count.*own `weight` to `mean_over_cycle`"):
            optimizer.minimize(losses, weight=counts)
        optimizer, _, _ = accumulating(model)
        with pytest.raises(ValueError, match="no other arguments"):
            optimizer.minimize(losses, weight=counts, grad_loss=1.0)
        with pytest.raises(ValueError, match="at least two"):
            optimizer.minimize(losses[:1], weight=counts[:1])
        with pytest.raises((TypeError, ValueError), match="`weight` must be"):
            optimizer.minimize(model.words, weight=counts)


@pytest.mark.law("L17")
def test_several_losses_after_a_train_op_of_one_are_refused():
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        optimizer.minimize(model.words + model.order)
        with pytest.raises(ValueError, match="several losses.* before the first train op is created"):
            optimizer.minimize(losses, weight=counts)


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("size", [2, 4, 5])
def test_counts_of_the_whole_batch_are_exact_through_value_and_gradients(size):
    """As the guide says: the counts are scalars, which each micro-batch gets unchanged."""
    with tf.Graph().as_default():
        model = Pretraining()

        def loss(ids, mask, labels, masked, rows):
            vectors = tf.nn.embedding_lookup(model.table, ids)
            words = tf.reduce_sum(tf.reduce_sum((vectors - 1.0) ** 2, -1) * mask) / masked
            pooled = tf.linalg.matvec(tf.reduce_mean(vectors, 1), model.head)
            order = tf.reduce_sum((pooled - labels) ** 2) / rows
            return (words + order) * rows / tf.cast(tf.shape(ids)[0], tf.float32)

        data = (model.ids, model.mask, model.labels, model.masked, tf.cast(model.sentences, tf.float32))
        _, pairs = accum.compat.v1.value_and_gradients(loss, data, model.variables, size, whole_batch=())
        ours = model.train(momentum().apply_gradients(pairs), FULL)
    assert_near(ours, plain())


# ----------------------------------------------------------------------------------------------------------------
# Several train ops of one optimizer


@pytest.mark.slow
@pytest.mark.law("L2")
def test_two_train_ops_share_the_accumulators_of_each_loss():
    with tf.Graph().as_default(), tf1.Session() as session:
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        train_ops = [optimizer.minimize(losses, weight=counts) for _ in range(2)]
        session.run(tf1.global_variables_initializer())
        for number, batch in enumerate(MICRO):
            session.run(train_ops[number % 2], model.feed(batch))
        ours = session.run(model.variables)
    assert_near(ours, plain())


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("other", ["one loss", "three losses", "another variable", "gradients of one"])
def test_a_train_op_of_other_losses_is_refused(other):
    """Its sums would be divided by the counts of the first train op, or would not be kept at all."""
    with tf.Graph().as_default():
        model = Pretraining()
        optimizer, losses, counts = accumulating(model)
        losses = losses[::-1]  # the second one does not depend on the head
        optimizer.minimize(losses, weight=counts[::-1])
        with pytest.raises(ValueError, match="pass as many losses to each.*AccumOptimizer. for each train op"):
            if other == "one loss":
                optimizer.minimize(model.words)
            elif other == "three losses":
                optimizer.minimize(losses + [model.words], weight=counts + [1.0])
            elif other == "another variable":
                optimizer.minimize(losses[::-1], weight=counts)
            else:
                optimizer.apply_gradients(optimizer.compute_gradients(model.words))


class OnlyThoseWithGradients(tf1.train.MomentumOptimizer):
    """An optimizer whose `compute_gradients` leaves out variables without a gradient, as programs do."""

    def compute_gradients(self, *args, **kwargs):
        return [pair for pair in super().compute_gradients(*args, **kwargs) if pair[0] is not None]


@pytest.mark.slow
@pytest.mark.law("L2")
def test_a_variable_that_only_a_later_loss_depends_on_is_updated():
    with tf.Graph().as_default():
        model = Pretraining()
        _, losses, counts = accumulating(model)
        optimizer = accum.compat.v1.AccumOptimizer(OnlyThoseWithGradients(0.1, 0.9), K)
        ours = model.train(optimizer.minimize(losses, weight=counts), MICRO)
    assert_near(ours, plain())
    assert largest_difference(ours[1:], plain([])[1:]) > 1e-2  # the head, of which the first loss knows nothing


@pytest.mark.slow
@pytest.mark.law("L2")
def test_separate_ops_keep_the_counts_whatever_accum_steps_is():
    with tf.Graph().as_default(), tf1.Session() as session:
        model = Pretraining()
        _, losses, counts = accumulating(model)
        ops = accum.compat.v1.AccumOptimizer(momentum()).accumulation_ops(losses, weight=counts)
        session.run(tf1.global_variables_initializer())
        for number, batch in enumerate(MICRO, start=1):
            session.run(ops.accumulate, model.feed(batch))
            if number % K == 0:
                session.run(ops.apply)
        ours = session.run(model.variables)
    assert_near(ours, plain())
