"""Taggers, memory networks, classifiers of texts, speech and clicks: programs that only run with `split_batch`."""

import contextlib
import logging
import os
import sys
from unittest import mock

import numpy as np

from public_programs._program import (
    RANDOM,
    TF_IMPORT,
    Program,
    Splitting,
    fed,
    integers,
    namespace,
    normal,
    split,
    stand_in,
    tf,
    uniform,
)


def sequence_tagging():
    from model.ner_model import NERModel

    sizes = {"nwords": 30, "nchars": 20, "ntags": 3, "dim_word": 8, "dim_char": 4, "hidden_size_char": 4}
    options = {"use_chars": True, "use_crf": True, "embeddings": None, "lr_method": "adam", "clip": 0.5}
    logger, tags = logging.getLogger("sequence_tagging"), {"O": 0, "A": 1, "B": 2}
    config = namespace(hidden_size_lstm=8, logger=logger, vocab_tags=tags, **sizes, **options)

    def build(accum_steps, words, lengths, letters, word_lengths, labels):
        model = NERModel(config)
        batch = {"word_ids": words, "sequence_lengths": lengths, "char_ids": letters, "word_lengths": word_lengths}
        with fed(**batch, labels=labels, dropout=tf.constant(1.0), lr=tf.constant(1e-2)):
            model.build()
        return model.train_op, model.loss

    lengths = 2 + integers(4)
    return (integers(30, 5), lengths, integers(20, 5, 6), 1 + integers(6, 5), integers(3, 5)), build


def chinese_ner():
    stand_in("jieba", initialize=lambda: None)
    from model import Model

    sizes = {"lr": 1e-2, "char_dim": 8, "lstm_dim": 8, "seg_dim": 4, "num_tags": 4, "num_chars": 30}

    def build(accum_steps, letters, segments, targets):
        given = {"ChatInputs": letters, "SegInputs": segments, "Targets": targets, "Dropout": tf.constant(1.0)}
        with fed(**given):
            model = Model({**sizes, "optimizer": "adam", "clip": 0.5})
        return model.train_op, model.loss

    letters = 1 + integers(29, 6)
    letters[range(6) >= (3 + integers(4))[:, None]] = 0
    return (letters, integers(4, 6), integers(4, 6)), build


def memory_network():
    from memn2n import memn2n

    memn2n.add_gradient_noise = lambda gradient: gradient  # drawn at random

    def build(accum_steps, stories, queries, answers):
        with fed(stories=stories, queries=queries, answers=answers, learning_rate=tf.constant(1e-2)):
            with tf.Session() as session:
                model = memn2n.MemN2N(8, 30, 6, 5, 8, session=session)
        return model.train_op, model.loss_op

    return (integers(30, 5, 6), integers(30, 6), np.eye(30, dtype="int32")[integers(30)]), build


def text_cnn():
    from text_cnn import TextCNN

    def build(accum_steps, words, labels):
        with fed(input_x=words, input_y=labels, dropout_keep_prob=tf.constant(1.0)):
            cnn = TextCNN(10, 3, 30, 8, [2, 3, 4], 4, l2_reg_lambda=0.1)
        cnn.loss = split(cnn.loss, (words, labels))
        # As in `train.py`, which is one function around files of texts.
        global_step = tf.Variable(0, name="global_step", trainable=False)
        optimizer = tf.train.AdamOptimizer(1e-3)
        return optimizer.apply_gradients(optimizer.compute_gradients(cnn.loss), global_step=global_step), cnn.loss

    return (integers(30, 10), np.eye(3, dtype="float32")[integers(3)]), build


def deep_fm():
    stand_in("sklearn")
    stand_in("sklearn.base", **{name: type(name, (), {}) for name in ("BaseEstimator", "TransformerMixin")})
    stand_in("sklearn.metrics", roc_auc_score=None)
    stand_in("yellowfin", YFOptimizer=None)
    from DeepFM import DeepFM

    def build(accum_steps, indices, values, labels):
        given = {"feat_index": indices, "feat_value": values, "label": labels}
        given["train_phase"] = tf.placeholder_with_default(True, [], "train_phase")
        keep = {"dropout_keep_fm": tf.ones([2]), "dropout_keep_deep": tf.ones([3])}
        options = {"deep_layers": [8, 8], "batch_norm": 1, "l2_reg": 0.01, "learning_rate": 1e-3}
        with fed(**given, **keep), mock.patch.object(tf, "Graph", tf.get_default_graph):
            with mock.patch.object(np.random, "normal", RANDOM.normal):
                model = DeepFM(30, 6, **options)
        return model.optimizer, model.loss

    return (integers(30, 6), uniform(6), (uniform(1) < 0.5).astype("float32")), build


def tacotron():
    stand_in("unidecode", unidecode=None)
    stand_in("inflect", engine=lambda: None)
    from hparams import hparams
    from models import modules, tacotron

    small = {"num_mels": 6, "num_freq": 12, "outputs_per_step": 2, "embed_depth": 8, "prenet_depths": [8, 6]}
    small.update(decay_learning_rate=False, initial_learning_rate=1e-3)
    small.update(dict.fromkeys(("encoder_depth", "postnet_depth", "attention_depth", "decoder_depth"), 8))
    for name, value in small.items():
        hparams.set_hparam(name, value)
    whole, drop = modules.conv1d, tf.layers.dropout

    def conv1d(inputs, size, channels, *others):
        return whole(inputs, size, min(channels, 8), *others)

    def build(accum_steps, letters, lengths, mels, linear):
        without = mock.patch.object(tf.layers, "dropout", lambda x, **options: drop(x, **dict(options, rate=0.0)))
        with without, mock.patch.object(modules, "conv1d", conv1d):
            model = tacotron.Tacotron(hparams)
            model.initialize(letters, lengths, mels, linear)
            model.add_loss()
        # As in `train.py`, which is one function around files of audio.
        model.loss = split(model.loss, (letters, lengths, mels, linear))
        model.add_optimizer(tf.Variable(0, name="global_step", trainable=False))
        return model.optimize, model.loss

    return (integers(30, 7), 3 + integers(5), normal(8, 6), normal(8, 12)), build


def dc_tts():
    for name in ("tqdm", "librosa", "matplotlib", "matplotlib.pyplot"):
        stand_in(name, tqdm=None, pyplot=None, use=lambda _: None)
    from hyperparams import Hyperparams

    Hyperparams.e, Hyperparams.d, Hyperparams.n_mels, Hyperparams.dropout_rate = 8, 8, 6, 0.0
    Hyperparams.max_N, Hyperparams.max_T = 12, 10
    import train

    whole = tf.layers.conv1d

    def conv1d(*arguments, **options):
        return whole(*arguments, bias_initializer=tf.random_normal_initializer(seed=4), **options)

    def build(accum_steps, letters, mels):
        train.get_batch = lambda: (letters, mels, None, None, None)
        with mock.patch.object(tf.layers, "conv1d", conv1d):
            graph = train.Graph()
        return graph.train_op, graph.loss

    return (integers(30, 9), uniform(8, 6)), build


def pointer_generator():
    import model as program

    program.FLAGS = namespace(pointer_gen=True, log_root="")
    sizes = {"batch_size": 8, "hidden_dim": 8, "emb_dim": 8, "max_dec_steps": 4, "max_enc_steps": 7}
    rates = {"rand_unif_init_mag": 0.1, "trunc_norm_init_std": 0.1, "lr": 0.1, "adagrad_init_acc": 0.1}
    others = {"max_grad_norm": 0.5, "cov_loss_wt": 1.0, "mode": "train", "coverage": True, "pointer_gen": True}

    def build(accum_steps, words, lengths, mask, given, target):
        names = {"enc_batch": words, "enc_lens": lengths, "enc_padding_mask": mask, "enc_batch_extend_vocab": words}
        names.update(dec_batch=given, target_batch=target, dec_padding_mask=tf.ones([8, 4]))
        names.update(max_art_oovs=tf.constant(0))
        for name in (
            "enc_batch",
            "enc_lens",
            "enc_padding_mask",
            "enc_batch_extend_vocab",
            "dec_batch",
            "target_batch",
        ):
            names[name] = tf.identity(names[name])
            names[name].set_shape([8, *names[name].shape[1:]])
        vocabulary = namespace(size=lambda: 30)
        on_any = mock.patch.object(tf, "device", lambda _: contextlib.ExitStack())  # it asks for a GPU
        with fed(**names), on_any, mock.patch.object(program.SummarizationModel, "_add_emb_vis", lambda *_: None):
            model = program.SummarizationModel(namespace(**sizes, **rates, **others), vocabulary)
            model.build_graph()
        return model._train_op, model._total_loss

    lengths = 3 + integers(5)
    mask = (np.arange(7) < lengths[:, None]).astype("float32")
    return (integers(30, 7), lengths, mask, integers(30, 4), integers(30, 4)), build


def transformer_xl():
    import train_gpu

    sizes = {"n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "mem_len": 4}
    rates = {"dropout": 0.0, "dropatt": 0.0, "init": "normal", "init_std": 0.1, "proj_init_std": 0.1, "clamp_len": -1}
    flags = dict.fromkeys(("same_length", "untie_r", "proj_share_all_but_first"), False)
    train_gpu.FLAGS = namespace(div_val=1, proj_same_dim=True, **sizes, **rates, **flags)

    def build(accum_steps, words, following, *memories):
        # As in `train`, which is one function around files of text.
        if not Splitting.is_on:
            memories = [tf.transpose(one, [1, 0, 2]) for one in memories]
        loss, _, grads_and_vars = train_gpu.single_core_graph(30, [], True, words, following, memories)
        grads, variables = zip(*grads_and_vars)
        clipped, _ = tf.clip_by_global_norm(grads, 0.25)
        step = tf.train.get_or_create_global_step()
        return tf.train.AdamOptimizer(1e-3).apply_gradients(zip(clipped, variables), step), loss

    return (integers(30, 6), integers(30, 6), normal(4, 8), normal(4, 8)), build


def qanet():
    stand_in("ujson", load=None)
    from model import Model

    sizes = {"batch_size": 8, "char_limit": 6, "hidden": 8, "char_dim": 4, "num_heads": 1, "ans_limit": 5}
    rates = {"learning_rate": 1e-3, "grad_clip": 5.0, "l2_norm": 3e-7, "decay": 0.9999}
    config = namespace(para_limit=12, ques_limit=6, **sizes, **rates)
    draw = np.random.RandomState(2).normal

    def build(accum_steps, *arrays):
        batch = (*arrays, arrays[0][:, 0])
        tables = draw(size=(30, 6)), draw(size=(20, 4))
        model = Model(config, namespace(get_next=lambda: batch), *tables, graph=tf.get_default_graph())
        return model.train_op, model.loss

    def text(length, longest):
        words = 1 + integers(29, length)
        words[np.arange(length) >= (2 + integers(longest - 1))[:, None]] = 0
        return words

    def answer(length):
        return np.eye(length, dtype="int32")[integers(2)]

    letters = 1 + integers(19, 12, 6), 1 + integers(19, 6, 6)
    return (text(12, 12), text(6, 6), *letters, answer(12), answer(12)), build


def graph_filtering():
    import scipy.sparse

    sizes = {"n_users": 60, "n_items": 45}
    options = {"adj_type": "norm", "alg_type": "ngcf", "lr": 1e-2, "embed_size": 6, "batch_size": 8}
    options.update(layer_size="[6,4]", regs="[1e-3]", verbose=0, node_dropout_flag=0)
    norm = scipy.sparse.csr_matrix(np.random.RandomState(3).binomial(1, 0.1, size=(105, 105)) / 5.0)
    stand_in("utility.batch_test", args=namespace(**options), np=np)
    sys.modules["utility.batch_test"].__all__ = ["args", "np"]
    from NGCF import NGCF

    def build(accum_steps, *indices):
        drop = tf.zeros([2])
        with fed(*indices, drop, drop):
            model = NGCF(dict(sizes, norm_adj=norm), None)
        return model.opt, model.loss

    return (integers(60), integers(45), integers(45)), build


PROGRAMS = {
    "sequence-tagging": Program(
        "guillaumegenthial/sequence_tagging",
        "`NERModel.build`: recurrent over letters and words, with a conditional random field",
        None,
        sequence_tagging,
        unknown="axes",
        line={
            os.path.join("model", "ner_model.py"): [
                TF_IMPORT,
                (
                    r"^        # Generic functions that add training op",
                    "        self.loss = accum.compat.v1.split_batch(self.loss, ("
                    "self.word_ids, self.sequence_lengths, self.char_ids, self.word_lengths, "
                    "self.labels), 2)\n"
                    "        # Generic functions that add training op",
                    1,
                ),
            ]
        },
    ),
    "chinese-ner": Program(
        "zjy-ucas/ChineseNER",
        "`Model`: recurrent, with its own cell and a conditional random field",
        None,
        chinese_ner,
        unknown="axes",
        line={
            "model.py": [
                TF_IMPORT,
                (
                    r"^        self\.loss = self\.loss_layer\(self\.logits, self\.lengths\)",
                    "        self.loss = accum.compat.v1.split_batch(self.loss_layer(self.logits, self.lengths), ("
                    "self.char_inputs, self.seg_inputs, self.targets), 2)",
                    1,
                ),
            ]
        },
        note="jieba is not installed; an empty module stands in for it",
    ),
    "memn2n": Program(
        "domluna/memn2n",
        "`MemN2N`, a memory network with its clipping",
        None,
        memory_network,
        line={
            os.path.join("memn2n", "memn2n.py"): [
                TF_IMPORT,
                (
                    r"^        loss_op = cross_entropy_sum",
                    "        loss_op = accum.compat.v1.split_batch("
                    "cross_entropy_sum, (self._stories, self._queries, self._answers), 2)",
                    1,
                ),
            ]
        },
        note="the noise that it adds to gradients is left out",
    ),
    "text-cnn": Program(
        "dennybritz/cnn-text-classification-tf",
        "`TextCNN`, and the optimizer of `train.py`",
        None,
        text_cnn,
    ),
    "deepfm": Program(
        "ChenglongChen/tensorflow-DeepFM",
        "`DeepFM` with batch normalisation in a conditional",
        None,
        deep_fm,
        line={
            "DeepFM.py": [
                TF_IMPORT,
                (
                    r"^            # optimizer$",
                    "            self.loss = accum.compat.v1.split_batch("
                    "self.loss, (self.feat_index, self.feat_value, self.label), 2)\n"
                    "            # optimizer",
                    1,
                ),
            ]
        },
        note="scikit-learn is not installed; empty classes stand in for it",
    ),
    "tacotron": Program(
        "keithito/tacotron",
        "`Tacotron`: batch normalisation, recurrent layers, and a decoder with attention in a loop",
        None,
        tacotron,
        note="layers have at most 8 filters",
    ),
    "dc-tts": Program(
        "Kyubyong/dc_tts",
        "`Graph` of `train.py`: convolutions over time with attention",
        None,
        dc_tts,
        line={
            "train.py": [
                (r"^import tensorflow as tf", "import accum.compat.v1\nimport tensorflow as tf", 1),
                (
                    r"^                self\.loss = self\.loss_mels \+ self\.loss_bd1 \+ self\.loss_att",
                    "                self.loss = accum.compat.v1.split_batch("
                    "self.loss_mels + self.loss_bd1 + self.loss_att, (self.L, self.mels), 2)",
                    1,
                ),
            ]
        },
        note="biases begin at random: where they are zero, its layer normalisation divides a frame of zeros by the "
        "root of 1e-12, again and again, and gradients are not finite. librosa, matplotlib and tqdm are not installed; "
        "empty modules stand in for them",
    ),
    "transformer-xl": Program(
        "kimiyoung/transformer-xl",
        "`single_core_graph` of `train_gpu.py`: memories and relative positions",
        None,
        transformer_xl,
        subtree="tf",
        note="as for enwik8: without adaptive softmax, whose masks select words from the whole batch, so that little "
        "would be split. Its memories, which have the examples along their second axis, are fed with these first",
        line={
            "train_gpu.py": [
                TF_IMPORT,
                (
                    r"^    inp = tf\.transpose\(inp, \[1, 0\]\)$",
                    "    batch, mems = (inp, tgt, *mems), [tf.transpose(mem, [1, 0, 2]) for mem in mems]\n"
                    "    inp = tf.transpose(inp, [1, 0])",
                    1,
                ),
                (
                    r"^      all_vars = tf\.trainable_variables\(\)\n(?=      grads)",
                    "      loss = accum.compat.v1.split_batch(loss, batch, 2)\n"
                    "      all_vars = tf.trainable_variables()\n",
                    1,
                ),
            ]
        },
    ),
    "qanet": Program(
        "NLPLearn/QANet",
        "`Model`: convolutions and attention over questions and paragraphs, an average of the weights before the loss",
        None,
        qanet,
        line={
            "model.py": [
                TF_IMPORT,
                (
                    r"^            if trainable:$",
                    "            self.loss = accum.compat.v1.split_batch(self.loss, batch.get_next(), 2)\n"
                    "            if trainable:",
                    1,
                ),
            ]
        },
        note="the number of examples is a constant of its shapes. ujson is not installed; an empty module stands in",
    ),
    "ngcf": Program(
        "xiangwang1223/neural_graph_collaborative_filtering",
        "`NGCF`: a graph network over all users and items, of which the batch takes rows",
        None,
        graph_filtering,
        folder="NGCF",
        line={
            os.path.join("NGCF", "NGCF.py"): [
                TF_IMPORT,
                (
                    r"^        self\.opt = ",
                    "        self.loss = accum.compat.v1.split_batch("
                    "self.loss, (self.users, self.pos_items, self.neg_items), 2)\n        self.opt = ",
                    1,
                ),
            ]
        },
    ),
    "pointer-generator": Program(
        "abisee/pointer-generator",
        "`SummarizationModel`, recurrent, with attention, pointers and coverage",
        None,
        pointer_generator,
        line={
            "model.py": [
                TF_IMPORT,
                (
                    r"^    tvars = tf\.trainable_variables\(\)$",
                    "    loss_to_minimize = accum.compat.v1.split_batch(loss_to_minimize, ("
                    "self._enc_batch, self._enc_lens, self._enc_padding_mask, self._dec_batch, "
                    "self._target_batch), 2)\n"
                    "    tvars = tf.trainable_variables()",
                    1,
                ),
            ]
        },
    ),
}
