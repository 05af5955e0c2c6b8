"""Segmentation, detection, recognition."""

import builtins
import contextlib
from unittest import mock

import numpy as np

from public_programs._program import (
    IMPORT,
    MICRO,
    TF_IMPORT,
    Program,
    accumulated,
    fed,
    integers,
    namespace,
    normal,
    split,
    stand_in,
    tf,
    tf1,
    uniform,
)


def tf_unet():
    stand_in("PIL", Image=None)
    from tf_unet import unet

    def network(images, labels):
        reset, tf.reset_default_graph = tf.reset_default_graph, lambda: None
        try:
            with fed(x=images, y=labels, dropout_probability=tf.constant(1.0)):
                return unet.Unet(channels=1, n_class=2, layers=2, features_root=4)
        finally:
            tf.reset_default_graph = reset

    def build(accum_steps, images, labels):
        net = network(images, labels)
        net.cost = split(net.cost, (images, labels))
        trainer = unet.Trainer(net, optimizer="momentum", opt_kwargs={"momentum": 0.9, "learning_rate": 0.05})
        return trainer._get_optimizer(2, tf.Variable(0, name="global_step")), net.cost

    images = normal(44, 44, 1)
    inner = images[:, 8:36, 8:36, 0]  # what the net keeps of 44 pixels
    return (
        (images, np.stack([inner > 0, inner <= 0], -1).astype("float32")),
        build,
        lambda *batch: network(*batch).predicter,
    )


def facenet():
    stand_in("sklearn")
    stand_in("sklearn.model_selection", KFold=None)
    import facenet as program

    def build(accum_steps, images, positive, negative):
        net = lambda x: tf.nn.l2_normalize(tf1.layers.dense(x, 4, name="net", reuse=tf1.AUTO_REUSE), 1)
        step = tf1.train.get_or_create_global_step()
        loss = program.triplet_loss(net(images), net(positive), net(negative), 2.0)
        loss = split(loss, (images, positive, negative))
        tf1.add_to_collection("losses", loss)
        variables = tf1.trainable_variables()
        return program.train(loss, step, "MOM", 0.1, 0.9, variables, log_histograms=False), loss

    return (normal(6), normal(6), normal(6)), build


def dltk():
    for name in ("pandas", "reader"):
        stand_in(name, read_fn=None)
    stand_in("dltk.io.abstract_reader", Reader=None)
    from examples.applications.MRBrainS13_tissue_segmentation import train

    def build(accum_steps, images, labels):
        tf1.train.get_or_create_global_step()
        # Its summaries want slices of 128 x 128, but no train op needs them.
        images = tf.placeholder_with_default(images, [None, 1, None, None, 3])
        labels = tf.placeholder_with_default(labels, [None, 1, None, None])
        params = {"learning_rate": 0.05}
        spec = train.model_fn({"x": images}, {"y": labels}, tf.estimator.ModeKeys.TRAIN, params)
        return spec.train_op, spec.loss

    def evaluate(images, labels):
        return train.model_fn({"x": images}, {"y": labels}, tf.estimator.ModeKeys.PREDICT, {}).predictions

    return (1.03 * normal(1, 8, 8, 3), integers(9, 1, 8, 8)), build, evaluate


def east():
    import model

    def build(accum_steps, images, scores, geometry, masks):
        step = tf.get_variable("global_step", [], initializer=tf.constant_initializer(0), trainable=False)
        optimizer = tf.train.MomentumOptimizer(1e-4, 0.9)

        def loss_of(outputs, scores, geometry, masks):
            loss = model.loss(scores, outputs[0], geometry, outputs[1], masks)
            return tf.add_n([loss] + tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES))

        if accum_steps == 1:
            loss = loss_of(model.model(images, is_training=True), scores, geometry, masks)
            loss = split(loss, (images, scores, geometry, masks))
            gradients = optimizer.compute_gradients(loss)
        else:
            import accum.compat.v1

            loss, gradients = accum.compat.v1.value_and_gradients(
                lambda images, *_: model.model(images, is_training=True),
                (images, scores, geometry, masks),
                micro_batch_size=MICRO,
                whole_batch="all",
                loss=lambda outputs, _, *labels: loss_of(outputs, *labels),
            )
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        return tf.group(optimizer.apply_gradients(gradients, step), *updates), loss

    boxes = 512 * uniform(16, 16, 5)
    boxes[..., 4] = 0.1
    return (
        (
            255 * uniform(64, 64, 3),
            1.0 * (uniform(16, 16, 1) < 0.5).astype("float32"),
            boxes,
            np.ones_like(boxes[..., :1]),
        ),
        build,
        lambda images, *_: model.model(images, is_training=False),
    )


def ssd():
    import tf_utils
    from nets import ssd_vgg_300

    ssd = ssd_vgg_300.SSDNet(ssd_vgg_300.SSDNet.default_params._replace(num_classes=5))
    slim, sizes = ssd_vgg_300.slim, (64, 128, 256, 512, 1024)
    whole = slim.conv2d

    @slim.add_arg_scope
    def conv2d(inputs, filters, *arguments, **options):
        return whole(inputs, filters // THIN if filters in sizes else filters, *arguments, **options)

    counts = [len(anchors) + len(ratios) for anchors, ratios in zip(ssd.params.anchor_sizes, ssd.params.anchor_ratios)]
    shapes = [(*shape, count) for shape, count in zip(ssd.params.feat_shapes, counts)]

    def network(images):
        with mock.patch.object(slim, "conv2d", conv2d), slim.arg_scope(ssd.arg_scope(weight_decay=5e-4)):
            return ssd.net(images, is_training=False)[:3]  # without dropout

    def of_layers(flat, *last):
        parts = tf.split(flat, [int(np.prod(shape)) for shape in shapes], 1)
        return [tf.reshape(part, [-1, *shape, *last]) for part, shape in zip(parts, shapes)]

    def loss_of(outputs, classes, boxes, scores):
        divide = tf.div  # by the number of examples, which its own input makes a constant
        with mock.patch.object(tf, "div", lambda x, y, **options: divide(x, tf.cast(y, x.dtype), **options)):
            ssd.losses(outputs[2], outputs[1], of_layers(classes), of_layers(boxes, 4), of_layers(scores))
        return tf.losses.get_total_loss()

    def build(accum_steps, images, *labels):
        optimizer = tf_utils.configure_optimizer(namespace(optimizer="momentum", momentum=0.9), 2e-4)
        step = tf.train.get_or_create_global_step()
        if accum_steps == 1:
            loss = split(loss_of(network(images), *labels), (images, *labels))
            return optimizer.minimize(loss, step), loss
        import accum.compat.v1

        loss, gradients = accum.compat.v1.value_and_gradients(
            lambda images, *_: network(images),
            (images, *labels),
            micro_batch_size=MICRO,
            whole_batch="all",
            loss=lambda outputs, _, *labels: loss_of(outputs, *labels),
        )
        return optimizer.apply_gradients(gradients, step), loss

    def evaluate(images, *_):
        predictions, localisations, _ = network(images)
        return predictions, ssd.bboxes_decode(localisations, ssd.anchors(ssd.params.img_shape))

    anchors = sum(int(np.prod(shape)) for shape in shapes)
    labels = (integers(5, anchors).astype("int64"), 0.1 * normal(anchors, 4), 0.502 * uniform(anchors))
    return (normal(300, 300, 3), *labels), build, evaluate


THIN = 16  # what the numbers of filters are divided by
SMALL = 10  # what the sizes of PSPNet's images and pools are divided by


def thin(network, num_classes, factor=THIN):
    """Return the network with fewer filters in each layer but those of the classes."""

    def of_layer(name):
        layer = getattr(network, name)

        def method(self, height, width, filters, *arguments, **options):
            filters = filters if filters == num_classes else filters // factor
            return layer(self, height, width, filters, *arguments, **options)

        return method

    return type("Thin", (network,), {name: of_layer(name) for name in ("conv", "atrous_conv")})


def labelled_pixels(prepare_label, raw_output, labels, num_classes):
    """Return the predictions and the labels of the pixels that have one."""
    size = tf.stack(raw_output.get_shape()[1:3])
    labels = tf.reshape(prepare_label(labels, size, num_classes=num_classes, one_hot=False), [-1])
    indices = tf.squeeze(tf.where(tf.less_equal(labels, num_classes - 1)), 1)
    raw_output = tf.reshape(raw_output, [-1, num_classes])
    return tf.gather(raw_output, indices), tf.cast(tf.gather(labels, indices), tf.int32)


def pixels_loss(logits, labels, decay):
    variables = [var for var in tf.trainable_variables() if "weights" in var.name]
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels)
    return tf.reduce_mean(loss) + tf.add_n([decay * tf.nn.l2_loss(var) for var in variables])


def three_rates(is_fc):
    """Return the variables that `train.py` trains, each with the factor of its learning rate."""
    trained = [var for var in tf.trainable_variables() if "beta" not in var.name and "gamma" not in var.name]
    rates = {1.0: [var for var in trained if not is_fc(var)]}
    rates[10.0] = [var for var in trained if is_fc(var) and "weights" in var.name]
    rates[20.0] = [var for var in trained if is_fc(var) and "biases" in var.name]
    return rates


def deeplab():
    stand_in("PIL", Image=None)
    builtins.basestring, tf.Dimension.__truediv__ = str, tf.Dimension.__floordiv__  # its layers are Python 2's
    from deeplab_resnet import DeepLabResNetModel, prepare_label

    network = thin(DeepLabResNetModel, 5)

    def outputs(images):
        return network({"data": images}, is_training=False, num_classes=5).layers["fc1_voc12"]

    def build(accum_steps, images, labels):
        raw_output = outputs(images)
        logits, known = labelled_pixels(prepare_label, raw_output, labels, 5)
        loss, weight = pixels_loss(logits, known, 5e-4), tf.to_float(tf.size(known))
        loss = split(loss, (images, labels))
        rates = three_rates(lambda var: "fc" in var.name)
        gradients = tf.gradients(loss, sum(rates.values(), []))
        if accum_steps > 1:  # all of them, before one of the optimizers changes what the others' are computed from
            with tf.control_dependencies(gradients):
                gradients = [tf.identity(gradient) for gradient in gradients]
        gradients, train_ops = iter(gradients), []
        for rate, variables in rates.items():
            optimizer = accumulated(tf.train.MomentumOptimizer(1e-2 * rate, 0.9), accum_steps)
            options = {"weight": weight} if accum_steps > 1 else {}
            train_ops.append(optimizer.apply_gradients([(next(gradients), var) for var in variables], **options))
        return tf.group(*train_ops), loss

    def evaluate(images, labels):
        scores = tf.image.resize_bilinear(outputs(images), tf.shape(images)[1:3])
        return scores, tf.argmax(scores, axis=3)

    return (normal(33, 33, 3), unlabelled(integers(5, 33, 33, 1))), build, evaluate


def pspnet():
    from model import PSPNet50
    from tools import prepare_label

    small = thin(PSPNet50, 5, 4)

    def avg_pool(self, *sizes, name):
        return PSPNet50.avg_pool(self, *(size // SMALL for size in sizes), name=name)

    network = type("Small", (small,), {"avg_pool": avg_pool})

    def outputs(images, is_training=True):
        return network({"data": images}, is_training=is_training, num_classes=5).layers["conv6"]

    def loss_of(raw_output, _, labels):
        return pixels_loss(*labelled_pixels(prepare_label, raw_output, labels, 5), 1e-4)

    def build(accum_steps, images, labels):
        fc = [
            "conv5_3_pool1_conv",
            "conv5_3_pool2_conv",
            "conv5_3_pool3_conv",
            "conv5_3_pool6_conv",
            "conv6",
            "conv5_4",
        ]
        if accum_steps == 1:
            loss = split(loss_of(outputs(images), images, labels), (images, labels))
            rates = three_rates(lambda var: var.name.split("/")[0] in fc)
            variables = sum(rates.values(), [])
            gradients = dict(zip(variables, tf.gradients(loss, variables)))
        else:
            import accum.compat.v1

            loss, grads_and_vars = accum.compat.v1.value_and_gradients(
                lambda images, _: outputs(images),
                (images, labels),
                micro_batch_size=MICRO,
                whole_batch="all",
                loss=loss_of,
            )
            rates = three_rates(lambda var: var.name.split("/")[0] in fc)
            gradients = {var: gradient for gradient, var in grads_and_vars}
        train_ops = []
        for rate, variables in rates.items():
            optimizer = tf.train.MomentumOptimizer(5e-6 * rate, 0.9)
            train_ops.append(optimizer.apply_gradients([(gradients[var], var) for var in variables]))
        return tf.group(*train_ops), loss

    def evaluate(images, _):
        return outputs(images, is_training=False)

    images = normal(48, 48, 3) + 2.0 * normal(1, 1, 3)
    return (images, unlabelled(integers(5, 48, 48, 1))), build, evaluate


def h2g_net():
    from architectures.UNet import Unet

    def network():
        unet = Unet(input_shape=(16, 16, 3), nb_classes=3)
        with contextlib.redirect_stdout(None):
            return unet.create(), unet.get_dice_loss()

    def build(accum_steps, images, labels):
        model, dice_loss = network()
        optimizer, step = tf.train.MomentumOptimizer(0.05, 0.9), tf.train.get_or_create_global_step()

        def mean_loss(images, labels):
            loss = tf.reduce_mean(dice_loss(labels, model(images, training=True)))
            for update in model.get_updates_for(images):  # which `fit` would run
                tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
            return loss

        if accum_steps == 1:
            loss = split(mean_loss(images, labels), (images, labels))
            gradients = optimizer.compute_gradients(loss)
        else:
            import accum.compat.v1

            loss, gradients = accum.compat.v1.value_and_gradients(
                mean_loss, (images, labels), micro_batch_size=MICRO, whole_batch="batch_norm"
            )
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        return tf.group(optimizer.apply_gradients(gradients, step), *updates), loss

    def evaluate(images, labels):
        return network()[0](images, training=False)

    return (normal(16, 16, 3), np.eye(3, dtype="float32")[integers(3, 16, 16)]), build, evaluate


def unlabelled(labels):
    """Let some pixels, more in some images than in others, have the label that is ignored."""
    labels[uniform(*labels.shape[1:]) < uniform(*(1 for _ in labels.shape[1:]))] = 255
    return labels


UNET_3D = [
    TF_IMPORT,
    (
        r"^    net_output_ops = residual_unet_3d\(\n        inputs=features\['x'\],",
        "    def network(x):\n      return residual_unet_3d(\n        inputs=x,",
        1,
    ),
    (
        r"^(?=        return tf\.estimator\.EstimatorSpec\(\n            mode=mode,\n            predictions)",
        "        net_output_ops = network(features['x'])\n",
        1,
    ),
    (
        r"^    ce = (.*\n)(.*\n)(.*\n)    loss = tf.reduce_mean\(ce\)\n",
        (
            "    def mean_loss(x, y):\n"
            "        ce = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=network(x)['logits'], labels=y)\n"
            "        return tf.reduce_mean(ce)\n\n"
            "    loss, grads_and_vars = accum.compat.v1.value_and_gradients(\n"
            "        mean_loss, (features['x'], labels['y']), micro_batch_size=2, whole_batch='batch_norm')\n"
        ),
        1,
    ),
    (r"optimiser\.minimize\(loss, ", "optimiser.apply_gradients(grads_and_vars, ", 1),
    (r"^    my_image_summaries\['predictions'\].*\n", "", 1),
    (r"(?s)^    # 4\.2 .*?(?=^    # 5\.)", "", 1),
    (r"(?s)predictions=net_output_ops,\s+(?=loss=)", "", 1),
]

PROGRAMS = {
    "tf_unet": Program(
        "jakeret/tf_unet",
        "`unet.Unet` and the optimizer of `unet.Trainer`",
        {
            "tf_unet/unet.py": [
                TF_IMPORT,
                (r"tf\.train\.MomentumOptimizer\(", "accum.compat.v1.AccumOptimizer(tf.train.MomentumOptimizer(", 1),
                (r"\*\*self\.opt_kwargs\)\.minimize", "**self.opt_kwargs), 4).minimize", 1),
            ]
        },
        tf_unet,
        evaluates="`Unet.predicter`",
    ),
    "facenet": Program(
        "davidsandberg/facenet",
        "`facenet.triplet_loss`, `facenet.train` with its average of the weights",
        {
            "src/facenet.py": [
                IMPORT,
                (
                    r"(?m)^        grads = opt\.compute_gradients",
                    "        opt = accum.compat.v1.AccumOptimizer(opt, 4)\n"
                    "        averages = tf.train.ExponentialMovingAverage(moving_average_decay, global_step)\n"
                    "        opt.after_step(lambda: averages.apply(tf.trainable_variables()))\n"
                    "        grads = opt.compute_gradients",
                    1,
                ),
                (r"(?ms)^    variable_averages = .*?(?=^    with tf)", "", 1),
                (r"\[apply_gradient_op, variables_averages_op\]", "[apply_gradient_op]", 1),
            ]
        },
        facenet,
        folder="src",
        note="an average of its loss moves before the gradients are computed. A warning names it. The averages "
        "of its weights are not compared, because its own full batch computes them beside the update",
    ),
    "dltk": Program(
        "DLTK/DLTK",
        "`model_fn` of the segmentation of brains, a residual U-Net in 3-D",
        {"examples/applications/MRBrainS13_tissue_segmentation/train.py": UNET_3D},
        dltk,
        line={
            "examples/applications/MRBrainS13_tissue_segmentation/train.py": [
                TF_IMPORT,
                (
                    r"^    loss = tf\.reduce_mean\(ce\)",
                    "    loss = accum.compat.v1.split_batch(tf.reduce_mean(ce), (features['x'], labels['y']), 2)",
                    1,
                ),
            ]
        },
        splits=True,
        note='batch normalisation is that of the whole batch, by `value_and_gradients(…, whole_batch="batch_norm")`. '
        "Its summaries of predictions are left out. pandas and its reader of images are not installed; empty modules "
        "stand in for them. A factor in its data keeps its rectified units away from zero: without it, the full batch "
        "itself moves by 3e-4 when the last digit of an input changes",
        evaluates="predictions of its `model_fn`, with the moving averages",
    ),
    "deeplab": Program(
        "DrSleep/tensorflow-deeplab-resnet",
        "`DeepLabResNetModel`, and the loss and the three optimizers of `train.py`",
        {},
        deeplab,
        added=6,
        note="`train.py` is one function around files of images and weights, so its loss and optimizers are called "
        "from here. Each layer has a sixteenth of its filters, and batch normalisation is frozen, which is the "
        "program's default. Its loss is a mean over labelled pixels, so their number is passed as the weight of each "
        "optimizer. Its three optimizers share a backward pass, so all gradients are computed before one of them makes "
        "a step: without this, they race with the weights, as in the program's own full batch, and a resumed run ends "
        "elsewhere. `str` stands in for `basestring`, and a division without rest for `/`, as in Python 2",
        evaluates="scores and classes of pixels, as in `evaluate.py`",
    ),
    "pspnet": Program(
        "hellochick/PSPNet-tensorflow",
        "`PSPNet50`, and the loss and the three optimizers of `train.py`",
        {},
        pspnet,
        splits=True,
        added=9,
        note="`train.py` is one function around files of images and weights, so its loss and optimizers are called "
        "from here. Its pools fit images of 473 × 473; here, both are a tenth of that, each layer has a quarter of its "
        "filters, and the learning rate is 5e-6, because untrained weights have large gradients. Its batch "
        'normalisation and loss are those of the whole batch, by `value_and_gradients(…, whole_batch="all", '
        "loss=…)`. Rounding grows on the way back through 60 normalised layers, so variables near the input are not "
        "compared",
        evaluates="scores of pixels, as in `evaluate.py`",
    ),
    "h2g-net": Program(
        "andreped/H2G-Net",
        "`UNet.Unet` of Keras, with its batch normalisation and its Dice",
        {},
        h2g_net,
        splits=True,
        folder="src",
        added=5,
        note="its repository has no program that trains its network, so it is trained here as a static graph, by "
        '`value_and_gradients(…, whole_batch="batch_norm")` and momentum: with Adam, rounding decides nearly all '
        "variables, because each bias before a normalisation has a gradient of zero. What Keras's layers update "
        "is added to UPDATE_OPS",
        evaluates="classes of pixels, with the moving averages",
    ),
    "east": Program(
        "argman/EAST",
        "`model.model`, a ResNet-50 with slim's batch normalisation, and `model.loss` with its Dice",
        {},
        east,
        splits=True,
        added=7,
        note="detects text. `multigpu_train.py` is one function, so its optimizer is called from here. Batch "
        'normalisation and loss are those of the whole batch, by `value_and_gradients(…, whole_batch="all")`. Rounding '
        "grows on the way back through 50 normalised layers, so variables near the input are not compared",
        evaluates="scores and boxes, with the moving averages",
    ),
    "ssd": Program(
        "balancap/SSD-Tensorflow",
        "`nets.ssd_vgg_300`, its losses over boxes and classes, `tf_utils.configure_optimizer`",
        {},
        ssd,
        splits=True,
        added=7,
        evaluates="classes and boxes that it detects",
        note="detects objects. It chooses the hardest negatives of the whole batch, three for each positive, so the "
        'losses are those of the whole batch, by `value_and_gradients(…, whole_batch="all", loss=…)`. '
        "`train_ssd_network.py` is one function, so its losses and optimizer are called from here. Each layer has a "
        "sixteenth of its filters",
    ),
}
