"""Language models, translation, classification of texts."""

import os
import sys
import tempfile
from unittest import mock

from public_programs._program import (
    IMPORT,
    MICRO,
    TF_IMPORT,
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
)


def gpt_2():
    import model

    hparams = model.default_hparams()
    hparams.override_from_dict({"n_vocab": 30, "n_ctx": 8, "n_embd": 16, "n_head": 2, "n_layer": 2})

    def build(accum_steps, ids):
        logits = model.model(hparams=hparams, X=ids)["logits"]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 1:], logits=logits[:, :-1]))
        loss = split(loss, ids)
        optimizer = accumulated(tf.train.AdamOptimizer(learning_rate=1e-2), accum_steps)
        variables = [var for var in tf.trainable_variables() if "model" in var.name]
        return optimizer.apply_gradients(list(zip(tf.gradients(loss, variables), variables))), loss

    def evaluate(ids):
        import sample

        context = tf.reshape(ids, [K * MICRO, 8])[:, :4]
        # Of the first most likely word only: nothing is drawn.
        return sample.sample_sequence(hparams=hparams, length=4, context=context, batch_size=K * MICRO, top_k=1)

    return (integers(30, 8),), build, evaluate


def grover():
    from lm import modeling

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = modeling.GroverConfig(30, max_position_embeddings=16, **sizes, **no_dropout)
    model_fn = modeling.model_fn_builder(config, None, 1e-2, 100, 2, False)

    def build(accum_steps, ids):
        spec = model_fn({"input_ids": ids}, None, tf.estimator.ModeKeys.TRAIN, {})
        return spec.train_op, spec.loss

    def evaluate(ids):
        predictions = model_fn({"input_ids": ids}, None, tf.estimator.ModeKeys.PREDICT, {}).predictions
        return predictions["gt_logprobs"], predictions["top_p_required"]  # the others are drawn

    return (padded(9),), build, evaluate


def padded(length):
    """Return rows of words of different lengths, with zeros at the end."""
    ids = 1 + integers(29, length)
    lengths = 3 + integers(length - 2)
    ids[range(length) >= lengths[:, None]] = 0
    return ids


def transformer():
    stand_in("tqdm", tqdm=iter)
    from model import Transformer

    with tempfile.NamedTemporaryFile("w", suffix=".vocab", delete=False) as file:
        file.write("<pad>\n<unk>\n<s>\n</s>\n")
    sizes = {"vocab_size": 30, "d_model": 16, "d_ff": 32, "num_blocks": 2, "num_heads": 2, "maxlen1": 8, "maxlen2": 8}
    hparams = namespace(vocab=file.name, dropout_rate=0.0, lr=0.02, warmup_steps=4, **sizes)

    def build(accum_steps, source, given, target):
        loss, train_op, _, _ = Transformer(hparams).train((source, None, None), (given, target, None, None))
        return train_op, loss

    def evaluate(source, given, target):
        words = tf.fill([K * MICRO], "")
        return Transformer(hparams).eval((source, None, words), (given, target, None, words))[0]

    return (padded(8), padded(8), padded(8)), build, evaluate


def nmt():
    from nmt import attention_model, model_helper
    from nmt.utils import iterator_utils, standard_hparams_utils

    model_helper.VOCAB_SIZE_THRESHOLD_CPU = 0  # no table on a GPU
    hparams = standard_hparams_utils.create_standard_hparams()
    hparams.override_from_dict({"num_units": 8, "dropout": 0.0, "learning_rate": 1.0, "num_train_steps": 100})
    hparams.override_from_dict({"max_gradient_norm": 0.5, "warmup_steps": 1, "num_gpus": 0})
    for name in ("num_encoder_residual_layers", "num_decoder_residual_layers"):
        hparams.add_hparam(name, 0)
    for side in ("src", "tgt"):
        hparams.add_hparam(side + "_vocab_size", 30)
        hparams.add_hparam(side + "_vocab_file", "")
        hparams.add_hparam(side + "_embed_file", "")

    words = namespace(lookup=lambda _: tf.constant(1))  # what starts and ends a sentence

    def build(accum_steps, source, given, target, lengths, others):
        # As its input is: padded to the longest sentence of the batch.
        source, longest = source[:, : tf.reduce_max(lengths)], tf.reduce_max(others)
        given, target = given[:, :longest], target[:, :longest]
        batch = iterator_utils.BatchedInput(None, source, given, target, lengths, others)
        model = attention_model.AttentionModel(hparams, tf.contrib.learn.ModeKeys.TRAIN, batch, None, words)
        return model.update, model.train_loss

    def evaluate(source, given, target, lengths, others):
        batch = iterator_utils.BatchedInput(None, source, None, None, lengths, None)
        hparams.tgt_max_len_infer = 4
        mode, reverse = tf.contrib.learn.ModeKeys.INFER, namespace(lookup=lambda ids: ids)
        model = attention_model.AttentionModel(hparams, mode, batch, words, words, reverse)
        return tf.pad(model.sample_id, [[0, 4 - tf.shape(model.sample_id)[0]], [0, 0]])

    return (integers(30, 7), integers(30, 6), integers(30, 6), 3 + integers(5), 2 + integers(5)), build, evaluate


def hierarchical_attention():
    from p1_HierarchicalAttention_model import HierarchicalAttention

    def model_of(ids, labels, is_training):
        with fed(input_x=ids, input_y=labels, input_y_multilabel=None, dropout_keep_prob=tf.constant(1.0)):
            return HierarchicalAttention(3, 1e-2, 8, 2, 0.9, 12, 3, 30, 8, 8, is_training, clip_gradients=0.5)

    def build(accum_steps, ids, labels):
        model = model_of(ids, labels, True)
        return model.train_op, model.loss_val

    def evaluate(ids, labels):
        model = model_of(ids, labels, False)
        return model.logits, model.predictions

    return (integers(30, 12), integers(3)), build, evaluate


def nematus():
    from transformer import Transformer

    sizes = {"embedding_size": 16, "state_size": 16, "target_embedding_size": 16, "dim_per_factor": [16], "factors": 1}
    sizes.update(source_vocab_sizes=[30], target_vocab_size=30, translation_maxlen=12, transformer_num_heads=2)
    sizes.update(transformer_enc_depth=2, transformer_dec_depth=2, transformer_ffn_hidden_size=32)
    names = ("attn", "embeddings", "relu", "residual")
    config = namespace(
        **sizes,
        **{"transformer_dropout_" + name: 0.0 for name in names},
        transformer_drophead=0.0,
        label_smoothing=0.0,
        layer_normalization_type="layernorm",
        loss_function="cross-entropy",
        tie_decoder_embeddings=True,
        tie_encoder_decoder_embeddings=True,
        print_per_token_pro=False,
        model_version=0.2,
        samplesN=1,
        sampling_temperature=1.0,
        translation_strategy="beam_search",
    )

    def build(accum_steps, source, source_mask, target, target_mask):
        given = {"x": tf.transpose(source)[None], "x_mask": tf.transpose(source_mask), "y": tf.transpose(target)}
        given.update(y_mask=tf.transpose(target_mask), scores=None, index=None)
        with mock.patch.object(tf.compat.v1, "placeholder", lambda *_, name, **__: given[name]):
            loss = Transformer(config).loss
        loss = split(loss, (source, source_mask, target, target_mask))
        step = tf.compat.v1.train.get_or_create_global_step()

        def clip(grads_and_vars):
            grads, variables = zip(*grads_and_vars)
            return list(zip(tf.clip_by_global_norm(grads, clip_norm=1.0)[0], variables))

        optimizer = tf.compat.v1.train.AdamOptimizer(1e-3, 0.9, 0.98, 1e-6)
        if accum_steps == 1:
            return optimizer.apply_gradients(clip(optimizer.compute_gradients(loss)), step), loss
        return accumulated(optimizer, accum_steps, transform=clip).minimize(loss, step), loss

    source, target = padded(8), padded(8)
    return (source, (source > 0).astype("float32"), target, (target > 0).astype("float32")), build


def tensor2tensor():
    stand_in("tensorflow_probability")
    from tensor2tensor.layers import common_hparams, common_layers, transformer_layers
    from tensor2tensor.utils import optimize

    hparams = common_hparams.basic_params1()
    hparams.override_from_dict({"hidden_size": 16, "num_hidden_layers": 2, "layer_prepostprocess_dropout": 0.0})
    hparams.override_from_dict({"clip_grad_norm": 0.5, "weight_decay": 1e-3})
    hparams.layer_preprocess_sequence, hparams.layer_postprocess_sequence = "n", "da"
    sizes = {"num_encoder_layers": 0, "num_heads": 2, "filter_size": 32, "max_relative_position": 0}
    channels = {"attention_key_channels": 0, "attention_value_channels": 0}
    rates = {"attention_dropout": 0.0, "relu_dropout": 0.0}
    kinds = {"self_attention_type": "dot_product", "ffn_layer": "dense_relu_dense", "use_pad_remover": False}
    for name, value in {**sizes, **channels, **rates, **kinds}.items():
        if name in hparams:
            hparams.set_hparam(name, value)
        else:
            hparams.add_hparam(name, value)

    def build(accum_steps, ids, labels):
        words = tf.gather(tf.get_variable("embedding", [30, 16]), ids)
        encoded = transformer_layers.transformer_encoder(words, tf.zeros([1, 1, 1, 6]), hparams)
        logits = common_layers.dense(tf.reduce_mean(encoded, 1), 3, name="head")
        loss = split(tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits), (ids, labels))
        return optimize.optimize(loss, 1e-2, hparams), loss

    return (integers(30, 6), integers(3)), build


def openseq2seq():
    stand_in("open_seq2seq.data", WKTDataLayer=None)
    from open_seq2seq.optimizers import optimize_loss

    def build(accum_steps, inputs, labels):
        hidden = tf.layers.dense(inputs, 16, activation=tf.nn.relu, name="hidden")
        loss = tf.losses.sparse_softmax_cross_entropy(labels, tf.layers.dense(hidden, 3, name="head"))
        loss = split(loss, (inputs, labels))
        larc = {"larc_eta": 0.1, "larc_mode": "clip"}
        decayed = lambda step: tf.train.exponential_decay(0.1, step, 2, 0.5)
        return optimize_loss(loss, "Momentum", {"momentum": 0.9}, decayed, larc_params=larc), loss

    return (normal(6), integers(3)), build


def lingvo():
    operations = mock.MagicMock(assert_shape_match=lambda *_, **__: tf.no_op(), assert_same_dim0=lambda x, **_: x)
    sys.modules["lingvo.core.ops.gen_x_ops"] = operations
    for name in ("lingvo.core.hyperparams_pb2", "lingvo.core.plot", "model_pruning", "model_pruning.python"):
        stand_in(name, __path__=[])
    stand_in("model_pruning.python.pruning", MASK_COLLECTION="masks")
    sys.modules["model_pruning.python"].pruning = sys.modules["model_pruning.python.pruning"]
    from lingvo.core import layers_with_attention, learner, optimizer, py_utils

    def network(inputs, lengths):
        params = layers_with_attention.TransformerLayer.Params().Set(name="transformer", source_dim=8)
        params.tr_atten_tpl.num_attention_heads, params.tr_fflayer_tpl.hidden_dim = 2, 16
        layer = params.cls(params)
        paddings = 1.0 - tf.sequence_mask(lengths, 5, tf.float32)
        outputs, _ = layer.FPropDefaultTheta(tf.transpose(inputs, [1, 0, 2]), tf.transpose(paddings))
        return layer, tf.reduce_mean(outputs, 0)

    def build(accum_steps, inputs, lengths, targets):
        step = py_utils.GetOrCreateGlobalStepVar()
        layer, outputs = network(inputs, lengths)
        loss = split(tf.reduce_mean((outputs - targets) ** 2), (inputs, lengths, targets))
        params = learner.Learner.Params().Set(name="loss", learning_rate=1e-2, clip_gradient_norm_to_value=0.5)
        params.optimizer = optimizer.Adam.ParamsB()
        train_op, _ = params.cls(params).Apply(loss, layer.vars)
        if accum_steps > 1:
            return train_op, loss
        with tf.control_dependencies([train_op]):
            return tf.assign_add(step, 1), loss

    def evaluate(inputs, lengths, _):
        py_utils.GetOrCreateGlobalStepVar()
        return network(inputs, lengths)[1]

    return (normal(5, 8), 2 + integers(4), normal(8)), build, evaluate


GROVER = [
    TF_IMPORT,
    (r"num_warmup_steps, use_tpu\):", "num_warmup_steps, use_tpu, weight):", 1),
    (
        r"(?ms)^    tvars = tf\.trainable_variables\(\).*?^(?=    train_metrics = )",
        "    optimizer = accum.compat.v1.AccumOptimizer(optimizer, 4, count_steps=True)\n"
        "    train_op = optimizer.minimize(loss, global_step, weight=weight)\n\n",
        1,
    ),
]
WORDS = (
    r"num_warmup_steps, use_tpu\)$",
    "num_warmup_steps, use_tpu,\n                weight=tf.reduce_sum("
    "tf.cast(tf.not_equal(model.target_ids, model.pad_token_id), tf.float32)) + 1e-5)",
    1,
)

MASKED = "its loss is a mean over unpadded words, so their number is passed as the weight"

PROGRAMS = {
    "gpt-2": Program(
        "nshepperd/gpt-2",
        "`src/model.py`, and the loss and Adam of `train.py`",
        {},
        gpt_2,
        folder="src",
        added=1,
        note="`train.py` is one function around downloaded weights, so its loss and optimizer are called from here",
        evaluates="words of `sample_sequence`",
    ),
    "gpt-2-simple": Program(
        "minimaxir/gpt-2-simple",
        "`src/model.py`, and the loss and Adam of `finetune`",
        {},
        gpt_2,
        folder=os.path.join("gpt_2_simple", "src"),
        added=1,
        note="as gpt-2, from which it is derived",
    ),
    "grover": Program(
        "rowanz/grover",
        "`model_fn` of `lm.modeling` with its Adafactor",
        {"lm/optimization_adafactor.py": GROVER, "lm/modeling.py": [WORDS]},
        grover,
        line={
            "lm/modeling.py": [
                TF_IMPORT,
                (
                    r"^        total_loss = model\.lm_loss\(\)$",
                    "        total_loss = accum.compat.v1.split_batch(model.lm_loss(), input_ids, 2)",
                    1,
                ),
            ]
        },
        note=MASKED,
        evaluates="probabilities of its `model_fn`",
    ),
    "transformer": Program(
        "Kyubyong/transformer",
        "`Transformer.train`",
        {
            "model.py": [
                TF_IMPORT,
                (
                    r"optimizer = tf\.train\.AdamOptimizer\(lr\)",
                    "optimizer = accum.compat.v1.AccumOptimizer(tf.train.AdamOptimizer(lr), 4)",
                    1,
                ),
                (r"global_step=global_step\)", "global_step=global_step, weight=tf.reduce_sum(nonpadding))", 1),
            ]
        },
        transformer,
        line={
            "model.py": [
                TF_IMPORT,
                (
                    r"^        optimizer = tf\.train\.AdamOptimizer\(lr\)",
                    "        loss = accum.compat.v1.split_batch(loss, (xs[0], *ys[:2]), 2)\n"
                    "        optimizer = tf.train.AdamOptimizer(lr)",
                    1,
                ),
            ]
        },
        note=MASKED,
        evaluates="words of `Transformer.eval`",
    ),
    "lingvo": Program(
        "tensorflow/lingvo",
        "`TransformerLayer`, and `learner.Learner` with its Adam and its clipping",
        {
            "lingvo/core/learner.py": [
                (
                    r"^    var_grads, stats = self\.AdjustGradients\(\n(.*\n){2}.*$",
                    "    stats = {}\n"
                    "    self.optimizer.transform = lambda pairs: [\n"
                    "        (g, v) for v, g in self.AdjustGradients(\n"
                    "            var_grads.Pack([(v, g) for g, v in pairs]), gradient_mask=gradient_mask,\n"
                    "            gradient_adjuster=gradient_adjuster)[0].Flatten()]",
                    1,
                ),
            ],
            "lingvo/core/optimizer.py": [
                (r"^import lingvo\.compat as tf", "import accum.compat.v1\nimport lingvo.compat as tf", 1),
                (
                    r"^    optimizer = self\.GetOptimizer\(lr\)$",
                    "    optimizer = accum.compat.v1.AccumOptimizer(\n"
                    "        self.GetOptimizer(lr), 4, transform=self.transform)",
                    1,
                ),
                (
                    r"name='meta_backprop'\)",
                    "name='meta_backprop',\n          global_step=py_utils.GetOrCreateGlobalStepVar())",
                    1,
                ),
            ],
        },
        lingvo,
        commit="033b2f5d92310acba4944c9ebdea75755b5e4213",
        note="its newest commit needs Python 3.8, for which there is no TensorFlow 1.15, so it runs as of January "
        "2020. Its learner clips before its optimizer accumulates (`optimizer.Accumulator`, not used); with accum, it "
        "clips the accumulated gradient. Empty modules stand in for operations and protocol buffers that Bazel builds, "
        "and for matplotlib: the layer and the learner use none of them",
        evaluates="outputs of the layer",
    ),
    "nmt": Program(
        "tensorflow/nmt",
        "`attention_model.AttentionModel`, recurrent, with its warmup and decay",
        {
            "nmt/model.py": [
                IMPORT,
                (
                    r"^      # Gradients$",
                    "      def clip(grads_and_vars):\n"
                    "        grads, variables = zip(*grads_and_vars)\n"
                    "        grads = model_helper.gradient_clip(grads, hparams.max_gradient_norm)[0]\n"
                    "        return list(zip(grads, variables))\n\n"
                    "      opt = accum.compat.v1.AccumOptimizer(opt, 4, transform=clip)\n\n"
                    "      # Gradients",
                    1,
                ),
                (r"zip\(clipped_grads, params\)", "zip(gradients, params)", 1),
            ]
        },
        nmt,
        line={
            "nmt/model.py": [
                IMPORT,
                (
                    r"^      # Gradients$",
                    "      self.train_loss = accum.compat.v1.split_batch(self.train_loss, list(self.iterator[1:]), 2)\n"
                    "      # Gradients",
                    1,
                ),
            ]
        },
        evaluates="words that it translates",
    ),
    "nematus": Program(
        "EdinburghNLP/nematus",
        "`transformer.Transformer`, and Adam and the clipping of `model_updater`",
        {},
        nematus,
        folder="nematus",
        added=1,
        remaps=False,
        note="its `ModelUpdater` accumulates by itself, in three runs of a session for each step, and is not used: its "
        "loss and optimizer are called from here. TensorFlow 2.15's remapper crashes as it prepares the graph of its "
        "loss, with or without accum (`CHECK failed: … key not found: value`), so on TensorFlow 2 the remapper is off: "
        "`rewrite_options.remapping` of the session's `ConfigProto`",
    ),
    "tensor2tensor": Program(
        "tensorflow/tensor2tensor",
        "`transformer_layers.transformer_encoder`, `optimize.optimize` with LazyAdam and `optimize_loss`",
        {
            "tensor2tensor/utils/optimize.py": [
                (
                    r"^import tensorflow\.compat\.v1 as tf",
                    "import accum.compat.v1\nimport tensorflow.compat.v1 as tf",
                    1,
                ),
                (
                    r"^(  opt = ConditionalOptimizer.*)$",
                    "  def clip(grads_and_vars):\n"
                    "    grads, variables = zip(*grads_and_vars)\n"
                    "    return list(zip(tf.clip_by_global_norm(grads, hparams.clip_grad_norm)[0], variables))\n\n"
                    "  opt = ConditionalOptimizer(hparams.optimizer, learning_rate, hparams, use_tpu)\n"
                    "  opt = accum.compat.v1.AccumOptimizer(opt, 4, transform=clip)",
                    1,
                ),
                (r"clip_gradients=hparams.clip_grad_norm or None", "clip_gradients=None", 1),
            ]
        },
        tensor2tensor,
        note="a classifier over its encoder. TensorFlow Probability is not installed; an empty module stands in for it",
    ),
    "openseq2seq": Program(
        "NVIDIA/OpenSeq2Seq",
        "`optimizers.optimize_loss` with its layerwise rates (LARC)",
        {
            "open_seq2seq/optimizers/optimizers.py": [
                TF_IMPORT,
                (
                    r"^    # Compute gradients\.$",
                    "    def post_process(grads_and_vars):\n"
                    "      return post_process_gradients(grads_and_vars, [], lr, clip_gradients, larc_params)\n\n"
                    "    opt = accum.compat.v1.AccumOptimizer(opt, 4, transform=post_process)\n"
                    "    # Compute gradients.",
                    1,
                ),
                (
                    r"post_process_gradients\(\n              grads_and_vars,\n(.*\n){4}          \),",
                    "grads_and_vars,",
                    1,
                ),
            ]
        },
        openseq2seq,
        note="the model is a small one. Its own accumulation (`iter_size`), which needs Horovod, is not used. pandas "
        "and librosa are not installed, so an empty module stands in for its readers of data",
    ),
    "hierarchical-attention": Program(
        "brightmart/text_classification",
        "`HierarchicalAttention` with `tf.contrib.layers.optimize_loss`",
        {
            "p1_HierarchicalAttention_model.py": [
                TF_IMPORT,
                (
                    r"^(?=        train_op = tf_contrib)",
                    "        def clip(grads_and_vars):\n"
                    "            grads, variables = zip(*grads_and_vars)\n"
                    "            return list(zip(tf.clip_by_global_norm(grads, self.clip_gradients)[0], variables))\n\n"
                    "        def optimizer(rate):\n"
                    "            inner = tf.train.AdamOptimizer(rate)\n"
                    "            return accum.compat.v1.AccumOptimizer(inner, 4, transform=clip)\n\n",
                    1,
                ),
                (r'optimizer="Adam",clip_gradients=self\.clip_gradients', "optimizer=optimizer", 1),
            ]
        },
        hierarchical_attention,
        line={
            "p1_HierarchicalAttention_model.py": [
                TF_IMPORT,
                (
                    r"^(            self\.loss_val = self\.loss\(\))$",
                    "            self.loss_val = accum.compat.v1.split_batch("
                    "self.loss(), (self.input_x, self.input_y), 2)",
                    1,
                ),
            ]
        },
        subtree="a05_HierarchicalAttentionNetwork",
        evaluates="logits and `predictions`",
    ),
}
