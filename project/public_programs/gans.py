"""Two networks that train against each other."""

import os
import sys
import types
from unittest import mock

from public_programs._program import MICRO, TF_IMPORT, Program, namespace, normal, split, stand_in, tf, tf1


def pix2pix():
    with open(os.path.join(sys.path[0], "pix2pix.py"), encoding="utf-8") as file:
        source = file.read().rpartition("main()")[0]  # which would read images
    program, sizes = types.ModuleType("pix2pix"), ["--ngf=2", "--ndf=2", "--lr=0.0003"]
    with mock.patch.object(sys, "argv", ["pix2pix.py", "--mode=train", "--output_dir=", *sizes]):
        exec(source, vars(program))
    # With ref variables, its generator's gradient is computed from activations of before its discriminator's step and
    # from weights of after it.
    tf1.enable_resource_variables()

    adam = tf.train.AdamOptimizer

    def without_dropout():
        return mock.patch.object(tf.nn, "dropout", lambda x, **_: x)

    def build(accum_steps, inputs, targets):
        optimizer = mock.patch.object(tf.train, "AdamOptimizer", lambda *rates: adam(*rates, epsilon=1e-3))
        with optimizer, without_dropout():
            model = program.create_model(inputs, targets)
        loss = tf.reduce_mean(tf.abs(targets - model.outputs))
        return model.train, loss

    def evaluate(inputs, targets):
        with without_dropout(), tf.variable_scope("generator"):
            return program.create_generator(inputs, 3)

    return (normal(256, 256, 3), normal(256, 256, 3)), build, evaluate


PIX2PIX = [
    (r"^import tensorflow as tf", "import accum.compat.v1\nimport tensorflow as tf", 1),
    (r"^def create_model\(inputs, targets\):", "def create_networks(inputs, targets):", 1),
    (
        r'^    with tf\.variable_scope\("generator"\):\n(?=        out_channels)',
        '    with tf.variable_scope("generator", reuse=tf.AUTO_REUSE):\n',
        1,
    ),
    (
        r'^        with tf\.variable_scope\("discriminator"\):',
        '        with tf.variable_scope("discriminator", reuse=tf.AUTO_REUSE):',
        1,
    ),
    (
        r'^(?=    with tf\.name_scope\("discriminator_loss"\):)',
        "    return outputs, predict_real, predict_fake\n\n\n"
        "def compute_losses(networks, inputs, targets):\n"
        "    outputs, predict_real, predict_fake = networks\n",
        1,
    ),
    (
        r'^(?=    with tf\.name_scope\("discriminator_train"\):)',
        "    return discrim_loss, gen_loss\n\n\n"
        "def create_model(inputs, targets):\n"
        "    def gradients_of(number, scope):\n"
        "        loss, grads_and_vars = accum.compat.v1.value_and_gradients(\n"
        '            create_networks, (inputs, targets), micro_batch_size=2, whole_batch="all",\n'
        "            loss=lambda networks, *batch: compute_losses(networks, *batch)[number])\n"
        "        return loss, [(grad, var) for grad, var in grads_and_vars if var.name.startswith(scope)]\n\n"
        '    discrim_loss, discrim_grads_and_vars = gradients_of(0, "discriminator")\n'
        '    gen_loss, gen_grads_and_vars = gradients_of(1, "generator")\n'
        "    outputs, predict_real, predict_fake = create_networks(inputs, targets)\n\n",
        1,
    ),
    (r"^        discrim_tvars = .*\n", "", 1),
    (r"^        discrim_grads_and_vars = .*\n", "", 1),
    (
        r"^        discrim_train = (.*)$",
        "        with tf.control_dependencies([grad for grad, _ in gen_grads_and_vars]):\n"
        "            discrim_train = discrim_optim.apply_gradients(discrim_grads_and_vars)",
        1,
    ),
    (r"^            gen_tvars = .*\n", "", 1),
    (r"^            gen_grads_and_vars = .*\n", "", 1),
    (r"ema\.apply\(\[discrim_loss, gen_loss_GAN, gen_loss_L1\]\)", "ema.apply([discrim_loss, gen_loss])", 1),
    (r"ema\.average\(gen_loss_(GAN|L1)\)", "ema.average(gen_loss)", 2),
]


def in_channels_last(convolve):
    """Return a convolution that computes NCHW as NHWC, because TensorFlow has no other on a CPU."""

    def turned(x, filters, *_, data_format="NHWC", strides, output_shape=None, **options):
        if data_format == "NCHW":
            x, strides = tf.transpose(x, [0, 2, 3, 1]), [strides[at] for at in (0, 2, 3, 1)]
            output_shape = output_shape and [output_shape[at] for at in (0, 2, 3, 1)]
        options.update({"output_shape": output_shape} if output_shape else {})
        y = convolve(x, filters, strides=strides, **options)
        return tf.transpose(y, [0, 3, 1, 2]) if data_format == "NCHW" else y

    return turned


def stylegan2():
    stand_in("requests")
    from dnnlib import tflib
    from dnnlib.tflib.ops import fused_bias_act, upfirdn_2d
    from training import loss

    upfirdn_2d._upfirdn_2d_cuda = upfirdn_2d._upfirdn_2d_ref
    fused_bias_act._fused_bias_act_cuda = fused_bias_act._fused_bias_act_ref
    sizes = {"num_channels": 3, "resolution": 8, "label_size": 0, "fmap_base": 32, "fmap_max": 8}
    sizes.update(latent_size=8, dlatent_size=8, mapping_fmaps=8, mapping_layers=2, fused_modconv=False)
    sizes.update(randomize_noise=False, style_mixing_prob=None, mbstd_group_size=1)
    adam = {"learning_rate": 0.01, "beta1": 0.0, "beta2": 0.99, "epsilon": 1e-8}

    def networks():
        names = {"G": "training.networks_stylegan2.G_main", "D": "training.networks_stylegan2.D_stylegan2"}
        return [tflib.Network(name, func_name=function, **sizes) for name, function in names.items()]

    def on_cpu():
        convolutions = {name: in_channels_last(getattr(tf.nn, name)) for name in ("conv2d", "conv2d_transpose")}
        return mock.patch.multiple(tf.nn, **convolutions)

    def losses(reals, latents):
        generator, discriminator = networks()
        labels = tf.zeros([tf.shape(reals)[0], 0])
        data = namespace(get_random_labels_tf=lambda _: labels)
        with mock.patch.object(tf, "random_normal", lambda _: latents):
            ours = loss.G_logistic_ns(generator, discriminator, None, data, MICRO)[0]
            theirs, penalty = loss.D_logistic_r1(generator, discriminator, None, data, MICRO, reals, labels)
        means = split([tf.reduce_mean(ours), tf.reduce_mean(theirs + penalty)], (reals, latents))
        return list(zip((generator, discriminator), means))

    def build(accum_steps, reals, latents):
        with tf.Session(), on_cpu():
            pairs, optimizers = losses(reals, latents), []
            for network, loss_of in pairs:
                optimizers.append(tflib.Optimizer("Train" + network.name, **adam))
                optimizers[-1].register_gradients(loss_of, network.trainables)
            gradients = [one.grad_raw.values() for optimizer in optimizers for one in optimizer._devices.values()]
            # Of both, before one of them makes a step:
            with tf.control_dependencies(tf.nest.flatten(list(map(list, gradients))) if accum_steps > 1 else []):
                return tf.group(*(optimizer.apply_updates() for optimizer in optimizers)), pairs[1][1]

    def evaluate(reals, latents):
        with tf.Session(), on_cpu():
            generator, discriminator = networks()
            images = generator.get_output_for(latents, tf.zeros([tf.shape(reals)[0], 0]), truncation_psi=None)
            return images, discriminator.get_output_for(images, tf.zeros([tf.shape(reals)[0], 0]))

    return (normal(3, 8, 8), normal(8)), build, evaluate


PROGRAMS = {
    "pix2pix": Program(
        "affinelayer/pix2pix-tensorflow",
        "`create_model`, with its generator, its discriminator and the optimizers of both",
        {"pix2pix.py": PIX2PIX},
        pix2pix,
        line={
            "pix2pix.py": [
                TF_IMPORT,
                (
                    r'^    with tf\.name_scope\("discriminator_train"\):',
                    "    discrim_loss, gen_loss = accum.compat.v1.split_batch("
                    "(discrim_loss, gen_loss), (inputs, targets), 2)\n"
                    '    with tf.name_scope("discriminator_train"):',
                    1,
                ),
            ]
        },
        splits=True,
        own_names="^(discriminator|generator)_loss",
        note="both networks are called once for each of the two losses, over the whole batch, whose statistics they "
        'share: `value_and_gradients(…, whole_batch="all", loss=…)`. Dropout is left out. It runs with resource '
        "variables: what its own full batch reads of ref variables in the generator's gradient changes as the "
        "discriminator makes its step. Adam's `epsilon` is 1e-3, so that it does not divide rounding by rounding. Its "
        "averages of losses have other names, and the generator's two losses are averaged together",
        evaluates="images that its generator makes",
    ),
    "stylegan2": Program(
        "NVlabs/stylegan2",
        "networks, losses and `tflib.Optimizer` of `training_loop`, for generator and discriminator",
        {
            "dnnlib/tflib/optimizer.py": [
                TF_IMPORT,
                (
                    r"^( *)self\._shared_optimizers\[device_name\] = (self\.optimizer_class\(.*\))$",
                    "                self._shared_optimizers[device_name] = accum.compat.v1.AccumOptimizer(\n"
                    "                    self.optimizer_class(\n"
                    "                        name=optimizer_name, learning_rate=self.learning_rate,\n"
                    '                        **self.optimizer_kwargs), 4, nonfinite="skip_cycle", name=self.id)',
                    1,
                ),
                (r"all_ops\.append\(tf\.cond\(all_ok, apply_op, tf\.no_op\)\)", "all_ops.append(apply_op())", 1),
            ]
        },
        stylegan2,
        own_names="/beta[12]_power$",
        added=2,
        note="both networks make a step in each run, for which the program has runs of their own, so the gradients of "
        "both are computed before one of them makes a step. Its operations for a GPU are replaced by its own reference "
        "implementations, and convolutions over NCHW, which TensorFlow does not have on a CPU, are transposed. "
        "`mbstd_group_size` is 1, because a larger group mixes examples, and path length regularisation, which "
        "compares with a mean over a batch, is not used. A warning names an average of latent vectors that moves with "
        "each micro-batch. Its own accumulation (`minibatch_multiplier`) is not used",
        evaluates="images that its generator makes, and scores of its discriminator",
    ),
}
