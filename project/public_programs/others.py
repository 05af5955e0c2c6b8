"""Reinforcement learning, audio, drawings, learning to learn."""

import os
import sys
import types
from unittest import mock

import numpy as np

from public_programs._program import (
    IMPORT,
    MICRO,
    K,
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

PPO = (
    r"(?ms)^        # 3\. Calculate the gradients.*?^        grads_and_var = list\(zip\(grads, var\)\)\n",
    "        # 3. Calculate the gradients\n"
    "        def clip(grads_and_vars):\n"
    "            grads, variables = zip(*grads_and_vars)\n"
    "            return list(zip(tf.clip_by_global_norm(grads, max_grad_norm)[0], variables))\n\n"
    "        self.trainer = accum.compat.v1.AccumOptimizer(self.trainer, 4, transform=clip)\n"
    "        grads_and_var = self.trainer.compute_gradients(loss, params)\n"
    "        grads, var = zip(*grads_and_var)\n",
    1,
)


def ppo2():
    classes = {name: type(name, (), {}) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary")}
    stand_in("gym", spaces=namespace(**classes))
    stand_in("gym.spaces", **classes)
    from baselines.common.policies import build_policy
    from baselines.ppo2.model import Model
    from gym import spaces

    observed, action = spaces.Box(), spaces.Discrete()
    observed.dtype, observed.shape, action.n = "float32", (6,), 3
    policy = build_policy(namespace(observation_space=observed, action_space=action), "mlp", num_hidden=8)
    sizes = {"nbatch_act": None, "nbatch_train": None, "nsteps": 1, "ob_space": observed, "ac_space": action}

    def model_of(seen, *batch):
        with tf.Session(), fed(seen, seen, *batch, tf.constant(1e-2), tf.constant(0.2)):
            return Model(policy=policy, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, **sizes)

    def build(accum_steps, *batch):
        model = model_of(*batch)
        return model._train_op, model.stats_list[0] + 0.5 * model.stats_list[1] - 0.01 * model.stats_list[2]

    def evaluate(*batch):
        acting = model_of(*batch).act_model
        return acting.pi, acting.pd.mode(), acting.vf

    return (normal(6), integers(3), normal(), normal(), 1 + 0.1 * normal(), normal()), build, evaluate


def wavenet():
    stand_in("librosa")
    from wavenet import WaveNetModel, mu_law_encode, optimizer_factory

    sizes = ([1, 2, 4, 1, 2, 4], 2, 8, 8, 8, 16)

    def build(accum_steps, audio):
        model = WaveNetModel(tf.shape(audio)[0], *sizes, use_biases=True)
        loss = split(model.loss(audio), audio)
        optimizer = accumulated(optimizer_factory["adam"](1e-2, 0.9), accum_steps)
        return optimizer.minimize(loss, var_list=tf.trainable_variables()), loss

    def evaluate(audio):
        return WaveNetModel(1, *sizes, use_biases=True).predict_proba(mu_law_encode(audio[0], 16))

    return (0.3 * normal(40, 1),), build, evaluate


def maml():
    import main
    from maml import MAML

    def evaluate(inputs, labels, others, targets):
        main.FLAGS(["main", "--norm=None", f"--meta_batch_size={K * MICRO}", "--meta_lr=0.01", "--update_lr=0.01"])
        model = MAML(test_num_updates=2)
        batch = {"inputa": inputs, "labela": labels, "inputb": others, "labelb": targets}
        model.construct_model(batch, prefix="metaval_")
        return model.metaval_total_losses2

    def build(accum_steps, inputs, labels, others, targets):
        tasks = K * MICRO // accum_steps
        main.FLAGS(["main", "--norm=None", f"--meta_batch_size={tasks}", "--meta_lr=0.01", "--update_lr=0.01"])
        model = MAML(test_num_updates=2)
        model.construct_model({"inputa": inputs, "labela": labels, "inputb": others, "labelb": targets})
        return model.metatrain_op, model.total_losses2[0] * tasks / tf.to_float(tf.shape(inputs)[0])

    return (normal(5, 1), normal(5, 1), normal(5, 1), normal(5, 1)), build, evaluate


def tensorpack():
    import tensorpack as program
    from tensorpack.tfutils.common import get_global_step_var

    def cost(images, labels):
        images = tf.expand_dims(images, 3)
        hidden = program.Conv2D("conv0", images, 4, 3, activation=tf.nn.relu)
        hidden = program.MaxPooling("pool0", hidden, 2)
        logits = program.FullyConnected("fc0", hidden, 3)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels)
        return tf.reduce_mean(loss) + 1e-3 * program.regularize_cost("fc.*/W", tf.nn.l2_loss)

    def build(accum_steps, images, labels):
        kinds = [tf.TensorSpec((None, 8, 8), tf.float32, "images"), tf.TensorSpec((None,), tf.int32, "labels")]
        costs = []

        def kept(*batch):
            costs.append(split(cost(*batch), batch))
            return costs[-1]

        def optimizer():
            rate = tf.train.exponential_decay(1e-2, get_global_step_var(), 2, 0.5)
            clip = program.gradproc.GlobalNormClip(0.1)
            inner = program.optimizer.apply_grad_processors(tf.train.AdamOptimizer(rate), [clip])
            return accumulated(inner, accum_steps)

        trainer = program.SimpleTrainer()
        trainer.setup_graph(kinds, program.TensorInput(lambda: [images, labels], 10), kept, optimizer)
        return trainer.train_op, costs[0]

    return (normal(8, 8), integers(3)), build


def deepspeech():
    names = ("ctc_beam_search_decoder", "ctc_beam_search_decoder_batch", "Scorer", "Alphabet", "UTF8Alphabet")
    stand_in("ds_ctcdecoder", **dict.fromkeys(names))
    stand_in("attrdict", AttrDict=None)
    stand_in("xdg", BaseDirectory=None)
    for name in ("progressbar", "semver", "pyogg", "resampy"):
        stand_in(name)
    from deepspeech_training.util import config, helpers

    helpers.check_ctcdecoder_version = lambda: None  # reads a file that is no program
    from deepspeech_training import train

    sizes = {"n_input": 4, "n_context": 1, "n_cell_dim": 8, "n_hidden_6": 6, "cpu_device": "/cpu:0"}
    sizes.update({f"n_hidden_{number}": 8 for number in (1, 2, 3, 5)}, available_devices=["/cpu:0"])
    config.ConfigSingleton._config = type("Config", (dict,), {"__getattr__": dict.__getitem__})(sizes)
    train.FLAGS = namespace(relu_clip=20.0, layer_norm=False, train_cudnn=False, beta1=0.9, beta2=0.999, epsilon=1e-8)
    no_dropout = [None] * 6

    def build(accum_steps, audio, lengths, letters):
        indices = tf.where(letters >= 0)
        labels = tf.SparseTensor(indices, tf.gather_nd(letters, indices), tf.shape(letters, out_type=tf.int64))
        files = tf.fill(tf.shape(lengths), "")
        iterator = namespace(get_next=lambda: (files, (audio, lengths), labels))
        optimizer = accumulated(train.create_optimizer(1e-2), accum_steps)
        gradients, loss, _ = train.get_tower_results(iterator, optimizer, no_dropout)
        step = tf.train.get_or_create_global_step()
        return optimizer.apply_gradients(train.average_gradients(gradients), global_step=step), loss

    def evaluate(audio, lengths, _):
        return tf.nn.softmax(train.create_model(audio, lengths, no_dropout)[0])

    letters = integers(5, 4)
    letters[:, 2:][uniform(2) < 0.5] = -1
    return (normal(12, 4), 10 + integers(3), np.sort(letters)[:, ::-1].copy()), build, evaluate


def sketch_rnn():
    # Its packages import those of all models; they are no more than folders here.
    for name in ("magenta", "magenta.models", "magenta.contrib"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [os.path.join(sys.path[0], *name.split("."))]
    from magenta.models.sketch_rnn import model as program

    hparams = program.get_default_hparams()
    hparams.parse("max_seq_len=6,enc_rnn_size=8,dec_rnn_size=8,z_size=4,num_mixture=2,learning_rate=0.01")
    hparams.parse("kl_weight_start=0.5,kl_tolerance=0,grad_clip=0.02,use_recurrent_dropout=0")

    def model_of(strokes, lengths, drawn, is_training):
        hparams.batch_size, hparams.is_training = tf.shape(strokes)[0], is_training
        given, whole = [lengths, strokes], tf1.placeholder
        placeholder = lambda *args, **options: given.pop(0) if given else whole(*args, **options)
        with mock.patch.object(tf1, "placeholder", placeholder):
            with mock.patch.object(tf1, "random_normal", lambda *_, **__: drawn):
                return program.Model(hparams)

    def build(accum_steps, *batch):
        model = model_of(*batch, is_training=True)
        return model.train_op, model.cost

    def evaluate(*batch):
        model = model_of(*batch, is_training=False)
        return model.r_cost, model.kl_cost

    pens = np.eye(3, dtype="float32")[integers(3, 7)]
    return (np.concatenate([normal(7, 2), pens], -1), 3 + integers(4), normal(4)), build, evaluate


PROGRAMS = {
    "ppo2": Program(
        "openai/baselines",
        "`ppo2.model.Model` with `common.policies`",
        {"baselines/ppo2/model.py": [IMPORT, PPO]},
        ppo2,
        line={
            "baselines/ppo2/model.py": [
                IMPORT,
                (
                    r"^        # UPDATE THE PARAMETERS USING LOSS",
                    "        loss = accum.compat.v1.split_batch("
                    "loss, (train_model.X, A, ADV, R, OLDNEGLOGPAC, OLDVPRED), 2)\n"
                    "        # UPDATE THE PARAMETERS USING LOSS",
                    1,
                ),
            ]
        },
        note="gym is not installed; empty classes stand in for its spaces, and nothing is played",
        evaluates="what `act_model` does, and its values",
    ),
    "wavenet": Program(
        "ibab/tensorflow-wavenet",
        "`WaveNetModel.loss`, `optimizer_factory`",
        {},
        wavenet,
        added=1,
        note="`train.py` is one function around files of audio, so its `minimize` is called from here. librosa, which "
        "reads them, is not installed; an empty module stands in for it. Its tensors take less than 1 MB: the memory "
        "of its steps is that of TensorFlow's gradients of convolutions, about 20 MB each, of which one or two run at "
        "a time",
        evaluates="`predict_proba`",
    ),
    "deepspeech": Program(
        "mozilla/DeepSpeech",
        "`create_optimizer`, `get_tower_results` with its recurrent model, and `average_gradients`",
        {},
        deepspeech,
        line={
            "training/deepspeech_training/train.py": [
                (
                    r"^import tensorflow\.compat\.v1 as tfv1",
                    "import accum.compat.v1\nimport tensorflow.compat.v1 as tfv1",
                    1,
                ),
                (
                    r"^    avg_loss = tf\.reduce_mean\(input_tensor=total_loss\)",
                    "    avg_loss = accum.compat.v1.split_batch("
                    "tf.reduce_mean(input_tensor=total_loss), (batch_x, batch_seq_len), 2)",
                    1,
                ),
            ]
        },
        added=1,
        folder="training",
        note="`train` is one function around files of audio, so what it calls is called from here. Its decoder, "
        "progressbar and what reads audio are not installed; empty modules stand in for them",
        evaluates="probabilities of letters",
    ),
    "sketch-rnn": Program(
        "magenta/magenta",
        "`sketch_rnn.model.Model`, a recurrent variational autoencoder of drawings",
        {
            "magenta/models/sketch_rnn/model.py": [
                (
                    r"^import tensorflow\.compat\.v1 as tf",
                    "import accum.compat.v1\nimport tensorflow.compat.v1 as tf",
                    1,
                ),
                (
                    r"^      optimizer = tf\.train\.AdamOptimizer\(self\.lr\)",
                    "      def clip(grads_and_vars):\n"
                    "        return [(tf.clip_by_value(grad, -g, g), var) for grad, var in grads_and_vars]\n\n"
                    "      optimizer = tf.train.AdamOptimizer(self.lr)\n"
                    "      optimizer = accum.compat.v1.AccumOptimizer(optimizer, 4, transform=clip)",
                    1,
                ),
                (r"^      capped_gvs = .*\n", "", 1),
                (r"^          capped_gvs, global_step", "          gvs, global_step", 1),
            ]
        },
        sketch_rnn,
        line={
            "magenta/models/sketch_rnn/model.py": [
                (
                    r"^import tensorflow\.compat\.v1 as tf",
                    "import accum.compat.v1\nimport tensorflow.compat.v1 as tf",
                    1,
                ),
                (
                    r"^      gvs = optimizer\.compute_gradients\(self\.cost\)",
                    "      self.cost = accum.compat.v1.split_batch("
                    "self.cost, (self.input_data, self.sequence_lengths, eps), 2)\n"
                    "      gvs = optimizer.compute_gradients(self.cost)",
                    1,
                ),
            ]
        },
        note="what it draws is given, so that a full batch and its micro-batches draw the same. `kl_tolerance` is 0: "
        "a larger one is compared with the mean over a batch, so a micro-batch may be on its other side. note_seq, "
        "which other models need, is not installed, so its packages import nothing by themselves",
        evaluates="both costs, as in `evaluate_model`",
    ),
    "maml": Program(
        "cbfinn/maml",
        "`MAML.construct_model`, with second derivatives over a batch of tasks",
        {
            "maml.py": [
                (r"^import tensorflow as tf", "import accum.compat.v1\nimport tensorflow as tf", 1),
                (
                    r"optimizer = tf\.train\.AdamOptimizer\(self\.meta_lr\)",
                    "optimizer = accum.compat.v1.AccumOptimizer(tf.train.AdamOptimizer(self.meta_lr), 4)",
                    1,
                ),
            ]
        },
        maml,
        line={
            "maml.py": [
                (r"^import tensorflow as tf", "import accum.compat.v1\nimport tensorflow as tf", 1),
                (
                    r"^            self\.pretrain_op",
                    "            accum.compat.v1.split_batch((total_loss1, total_losses2), "
                    "(self.inputa, self.inputb, self.labela, self.labelb), 2)\n"
                    "            self.pretrain_op",
                    1,
                ),
            ]
        },
        evaluates="losses of validation after adapting",
    ),
    "tensorpack": Program(
        "tensorpack/tensorpack",
        "`SimpleTrainer.setup_graph` with its layers, `apply_grad_processors` and `GlobalNormClip`",
        {},
        tensorpack,
        added=1,
        note="the model is a small one, of its layers. Its own `AccumGradOptimizer` is not used. Its trainer advances "
        "`global_step` by a hook of its own in each run of the train op, which the check does not run",
    ),
}
