"""Detectors, depths, clouds of points and made-up images: programs that only run with `split_batch`."""

import functools
import os
from unittest import mock

import numpy as np

from public_programs._program import (
    TF_IMPORT,
    Program,
    fed,
    integers,
    namespace,
    normal,
    split,
    stand_in,
    tf,
    uniform,
)

THIN = 16  # what the numbers of filters are divided by


def yolov3():
    stand_in("easydict", EasyDict=type("EasyDict", (dict,), {"__getattr__": dict.get, "__setattr__": dict.__setitem__}))
    for name in ("cv2", "tqdm"):
        stand_in(name, tqdm=iter)
    os.makedirs(os.path.join("data", "classes"), exist_ok=True)
    with open(os.path.join("data", "classes", "coco.names"), "w") as file:
        file.write("cat\ndog\n")
    from core import common, utils

    whole = common.convolutional

    def convolutional(input_data, filters_shape, *arguments, **options):
        ends = [size // THIN if size % 32 == 0 else size for size in filters_shape[2:]]
        return whole(input_data, (*filters_shape[:2], *ends), *arguments, **options)

    common.convolutional = convolutional
    import train

    train.cfg.TRAIN.LEARN_RATE_INIT = 1e-2
    adam = tf.train.AdamOptimizer
    train.Dataset = lambda _: [None, None]
    anchors = 0.5 + np.random.RandomState(1).uniform(size=(3, 3, 2)).astype("float32")
    utils.get_anchors = lambda _: anchors
    names = ("input_data", "label_sbbox", "label_mbbox", "label_lbbox", "sbboxes", "mbboxes", "lbboxes")

    def build(accum_steps, *batch):
        with fed(**dict(zip(names, batch)), training=tf.placeholder_with_default(True, None, "training")):
            with mock.patch.object(tf.train, "AdamOptimizer", lambda rate: adam(rate, epsilon=1.0)):
                trained = train.YoloTrain()
        return trained.train_op_with_all_variables, trained.loss

    def labels(size):
        label = uniform(size, size, 3, 7)
        label[..., :4] *= 32
        label[..., 4:] = label[..., 4:] < 0.3
        return label

    boxes = [32 * uniform(4, 4) for _ in range(3)]
    return (uniform(64, 64, 3), labels(8), labels(4), labels(2), *boxes), build


def monodepth():
    from average_gradients import average_gradients
    from monodepth_model import MonodepthModel, monodepth_parameters, slim

    sizes = {"encoder": "vgg", "height": 128, "width": 128, "batch_size": 8, "num_threads": 1, "num_epochs": 1}
    options = {"do_stereo": False, "wrap_mode": "border", "use_deconv": False, "full_summary": False}
    weights = {"alpha_image_loss": 0.85, "disp_gradient_loss_weight": 0.1, "lr_loss_weight": 1.0}
    whole = slim.conv2d

    @slim.add_arg_scope
    def conv2d(x, filters, *arguments, **options):
        return whole(x, max(filters // THIN, 2), *arguments, **options)

    def build(accum_steps, left, right):
        # As in `train` of monodepth_main.py, which is one function around files of images, on two towers.
        step = tf.Variable(0, trainable=False)
        optimizer = tf.train.AdamOptimizer(1e-4)
        parts = list(zip(tf.split(left, 2, 0), tf.split(right, 2, 0)))
        gradients, losses = [], []
        for index, (ours, theirs) in enumerate(parts):
            with tf.variable_scope(tf.get_variable_scope()), mock.patch.object(slim, "conv2d", conv2d):
                parameters = monodepth_parameters(**sizes, **options, **weights)
                model = MonodepthModel(parameters, "train", ours, theirs, True if index else None, index)
            losses.append(split(model.total_loss, (ours, theirs)))
            gradients.append(optimizer.compute_gradients(losses[-1]))
        return optimizer.apply_gradients(average_gradients(gradients), global_step=step), tf.reduce_mean(losses)

    return (uniform(128, 128, 3), uniform(128, 128, 3)), build


def pointnet():
    stand_in("h5py")
    from models import pointnet_cls

    def build(accum_steps, points, labels):
        # As in `train` of train.py, which is one function around files of points.
        clouds, classes = tf.identity(points), tf.identity(labels)
        clouds.set_shape([8, 16, 3])  # `placeholder_inputs` of a constant batch size
        classes.set_shape([8])
        batch = tf.Variable(0)
        training = tf.placeholder_with_default(True, [])
        with mock.patch.object(tf.nn, "dropout", lambda x, *_, **__: x):
            predicted, ends = pointnet_cls.get_model(clouds, training, bn_decay=0.5)
        loss = split(pointnet_cls.get_loss(predicted, classes, ends), (clouds, classes))
        return tf.train.AdamOptimizer(1e-4, epsilon=1e-3).minimize(loss, global_step=batch), loss

    return (normal(16, 3), integers(40)), build


def dcgan():
    for name in ("scipy.misc", "cv2", "PIL"):
        stand_in(name, Image=None, imread=None)
    import model as program

    sizes = {"input_height": 16, "input_width": 16, "output_height": 16, "output_width": 16, "batch_size": 8}
    sizes.update(z_dim=8, gf_dim=2, df_dim=2, c_dim=3, dataset_name="")

    def build(accum_steps, images, latents):
        gan = program.DCGAN.__new__(program.DCGAN)
        gan.__dict__.update(sizes, y_dim=None, crop=True, max_to_keep=1)
        for name in ("d_bn1", "d_bn2", "d_bn3", "g_bn0", "g_bn1", "g_bn2", "g_bn3"):
            setattr(gan, name, program.batch_norm(name=name))
        real = tf.identity(images)
        real.set_shape([8, 16, 16, 3])  # its placeholder has a constant batch size
        with fed(real_images=real, z=latents):
            gan.build_model()
        # As in `train`, which is one function around files of images.
        gan.d_loss, gan.g_loss = split((gan.d_loss, gan.g_loss), (real, latents))
        adam = {"learning_rate": 1e-4, "beta1": 0.5, "epsilon": 1e-3}
        ours, theirs = tf.train.AdamOptimizer(**adam), tf.train.AdamOptimizer(**adam)
        gradients = ours.compute_gradients(gan.d_loss, gan.d_vars), theirs.compute_gradients(gan.g_loss, gan.g_vars)
        # Both steps are made in one run here, from the same weights.
        with tf.control_dependencies([gradient for pairs in gradients for gradient, _ in pairs]):
            return tf.group(ours.apply_gradients(gradients[0]), theirs.apply_gradients(gradients[1])), gan.d_loss

    return (normal(16, 16, 3), normal(8)), build


def autoencoder():
    import vae

    def build(accum_steps, images, noise):
        with mock.patch.object(tf, "random_normal", lambda *_, **__: noise):
            _, _, loss, _, _ = vae.autoencoder(images, images, 36, 4, 16, tf.constant(1.0))
        # As in `run_main.py`, which is one function around files of images.
        loss = split(loss, (images, noise))
        return tf.train.AdamOptimizer(1e-3).minimize(loss), loss

    return (uniform(36), normal(4)), build


def slim_yolov3():
    import model as program
    from utils import layer_utils, misc_utils

    slim = layer_utils.slim
    whole = slim.conv2d

    @slim.add_arg_scope
    def conv2d(inputs, filters, *arguments, **options):
        return whole(inputs, filters // THIN if filters % 32 == 0 else filters, *arguments, **options)

    anchors = 4 + 60 * np.random.RandomState(1).uniform(size=(9, 2)).astype("float32")

    def build(accum_steps, images, *labels):
        # As in `train.py`, which is a script around files of images.
        training = tf.placeholder_with_default(True, [], "phase_train")
        yolo = program.yolov3(2, anchors, use_static_shape=False)
        with tf.variable_scope("yolov3"), mock.patch.object(slim, "conv2d", conv2d):
            maps = yolo.forward(images, is_training=training)
        loss = yolo.compute_loss(maps, labels)
        loss[0] = split(loss[0], (images, *labels))
        step = tf.Variable(0.0, trainable=False)
        optimizer = misc_utils.config_optimizer("momentum", 1e-5)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            gradients = optimizer.compute_gradients(loss[0] + tf.losses.get_regularization_loss())
            clipped = [gv if gv[0] is None else [tf.clip_by_norm(gv[0], 100.0), gv[1]] for gv in gradients]
            return optimizer.apply_gradients(clipped, global_step=step), loss[0]

    def of_map(size):
        label = uniform(size, size, 3, 8)
        label[..., :4] = 4 + 56 * label[..., :4]
        label[..., 4] = label[..., 4] < 0.3
        label[..., 5:7] = np.eye(2)[(label[..., 5] < 0.5).astype(int)]
        label[..., 7] = 1
        return label

    return (uniform(64, 64, 3), of_map(2), of_map(4), of_map(8)), build


def steady_adam():
    """Let Adam not divide rounding by rounding, as where a bias before a normalisation has no gradient."""
    return mock.patch.object(tf.train, "AdamOptimizer", functools.partial(tf.train.AdamOptimizer, epsilon=1e-3))


def cyclegan():
    import model as program

    tf.enable_resource_variables()  # with ref variables, its optimizers race

    def build(accum_steps, x, y, fake_x, fake_y):
        images = [tf.identity(one) for one in (x, y, fake_x, fake_y)]
        for one in images:
            one.set_shape([8, 16, 16, 3])  # its readers and placeholders have a constant batch size
        readers = iter(images[:2])
        with mock.patch.object(program, "Reader", lambda *_, **__: namespace(feed=lambda: next(readers))):
            with fed(*images[2:]):
                gan = program.CycleGAN(batch_size=8, image_size=16, ngf=2)
            losses = gan.model()[:4]
        # As in `train` of train.py, which is one function around files of images.
        losses = split(losses, images)
        with steady_adam():
            return gan.optimize(*losses), losses[0]

    return tuple(uniform(16, 16, 3) for _ in range(4)), build


def ugatit():
    stand_in("cv2")
    import UGATIT as program

    tf.enable_resource_variables()  # with ref variables, its optimizers race
    sizes = {"img_size": 64, "img_ch": 3, "ch": 2, "n_res": 4, "n_dis": 5, "batch_size": 8}
    weights = {"adv_weight": 1, "cycle_weight": 10, "identity_weight": 10, "cam_weight": 1000, "ld": 10}
    names = {"phase": "train", "gan_type": "lsgan", "light": True, "sn": True, "smoothing": True, "augment_flag": False}

    class Feed(list):
        """Stands in for a dataset of files."""

        apply = make_one_shot_iterator = lambda self, *_: self

        def get_next(self):
            return self[0]

    def build(accum_steps, *images):
        gan = program.UGATIT.__new__(program.UGATIT)
        gan.__dict__.update(sizes, **weights, **names, trainA_dataset=0, trainB_dataset=1, dataset_num=8)
        batch = [tf.identity(one) for one in images]
        for one in batch:
            one.set_shape([8, 64, 64, 3])  # its datasets drop what does not fill a batch
        with mock.patch.object(tf.data.Dataset, "from_tensor_slices", lambda index: Feed([batch[index]])):
            with fed(learning_rate=tf.constant(1e-4)), steady_adam():
                gan.build_model()
        return tf.group(gan.D_optim, gan.G_optim), gan.Generator_loss

    return (normal(64, 64, 3), normal(64, 64, 3)), build


CONSTANT = "its placeholders have a constant batch size, on which the shapes of its layers depend"

PROGRAMS = {
    "yolov3": Program(
        "YunYang1994/tensorflow-yolov3",
        "`YoloTrain`: batch normalisation in conditionals, averages of the weights and a counter of its own",
        None,
        yolov3,
        unknown="rank",
        line={
            "train.py": [
                TF_IMPORT,
                (
                    r"^(?=            self\.model = YOLOV3)",
                    "            self.input_data.set_shape([None, None, None, 3])\n",
                    1,
                ),
                (
                    r"^(?=        with tf\.name_scope\('learn_rate'\))",
                    "        self.loss = accum.compat.v1.split_batch(self.loss, self.input_data, 2)\n",
                    1,
                ),
            ]
        },
        note="detects objects. Each layer has a sixteenth of its filters. Adam's `epsilon` is 1, so that it does "
        "not divide rounding by rounding. OpenCV, easydict and tqdm are not installed; "
        "empty modules stand in for them",
    ),
    "monodepth": Program(
        "mrharicot/monodepth",
        "`MonodepthModel` on two towers, with `average_gradients`",
        None,
        monodepth,
        note="each layer has a sixteenth of its filters",
    ),
    "pointnet": Program(
        "charlesq34/pointnet",
        "`models.pointnet_cls`: clouds of points, batch normalisation by hand in conditionals",
        None,
        pointnet,
        note=CONSTANT + ". Adam's `epsilon` is 1e-3, so that it does not divide rounding by rounding",
    ),
    "dcgan": Program(
        "carpedm20/DCGAN-tensorflow",
        "`DCGAN.build_model` with batch normalisation in place, and both optimizers",
        None,
        dcgan,
        note=CONSTANT + ". Adam's `epsilon` is 1e-3, so that it does not divide rounding by rounding",
    ),
    "yolov3-slim": Program(
        "wizyoung/YOLOv3_TensorFlow",
        "`yolov3` with slim's batch normalisation, a loop over examples in its loss, and the updates of `train.py`",
        None,
        slim_yolov3,
        note="detects objects. Each layer has a sixteenth of its filters. With other last digits in its input, the "
        "full batch itself moves as far as the split one is off",
    ),
    "cyclegan": Program(
        "vanhuyz/CycleGAN-TensorFlow",
        "`CycleGAN`: two generators, two discriminators, and its four optimizers",
        None,
        cyclegan,
        note=CONSTANT + ". Adam's `epsilon` is 1e-3, so that it does not divide rounding by rounding",
    ),
    "ugatit": Program(
        "taki0112/UGATIT",
        "`UGATIT.build_model`: attention of class activations, spectral normalisation that assigns, both optimizers",
        None,
        ugatit,
        line={
            "UGATIT.py": [
                (r"^from ops import", "import accum.compat.v1\nfrom ops import", 1),
                (
                    r'^            """ Result Image """',
                    "            self.Generator_loss, self.Discriminator_loss = accum.compat.v1.split_batch(\n"
                    "                (self.Generator_loss, self.Discriminator_loss), "
                    "(self.domain_A, self.domain_B), 2)\n"
                    '            """ Result Image """',
                    1,
                ),
            ]
        },
        note=CONSTANT + ". Adam's `epsilon` is 1e-3, so that it does not divide rounding by rounding. OpenCV is not "
        "installed; an empty module stands in for it",
    ),
    "vae": Program(
        "hwalsuklee/tensorflow-mnist-VAE",
        "`vae.autoencoder`, and the optimizer of `run_main.py`",
        None,
        autoencoder,
        note="what it draws is given",
    ),
}
