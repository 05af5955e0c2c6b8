"""BERT and its family."""

import json
import os
import re
import tempfile

import numpy as np

from public_programs._program import (
    IMPORT,
    RANDOM,
    ROWS,
    TF_IMPORT,
    Program,
    classification,
    integers,
    namespace,
    split,
    stand_in,
    tf,
)

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL = dict(SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16)

CLIPPED = """  def clip(grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    return list(zip(tf.clip_by_global_norm(grads, clip_norm=1.0)[0], variables))

  optimizer = accum.compat.v1.AccumOptimizer(optimizer, 4, transform=clip, count_steps=True)
  train_op = optimizer.minimize(loss, global_step{})
"""
FAMILY = [IMPORT, (r"(?ms)^  tvars = tf\.trainable_variables\(\).*?^(?=  return train_op)", CLIPPED.format(""), 1)]
INDENTED = re.sub(r"(?m)^( +)", lambda match: 2 * match.group(1), CLIPPED.format(""))


def bert_classifier():
    import modeling
    import optimization
    import run_classifier

    config = modeling.BertConfig(vocab_size=30, **SMALL)

    def build(accum_steps, ids, labels):
        ones, zeros = tf.ones_like(ids), tf.zeros_like(ids)
        loss = run_classifier.create_model(config, False, ids, ones, zeros, labels, 3, False)[0]
        loss = split(loss, (ids, labels))
        return optimization.create_optimizer(loss, 1e-2, 100, 2, False), loss

    def evaluate(ids, labels):
        features = {"input_ids": ids, "input_mask": tf.ones_like(ids), "segment_ids": tf.zeros_like(ids)}
        model_fn = run_classifier.model_fn_builder(config, 3, None, 1e-2, 100, 2, False, False)
        return model_fn(dict(features, label_ids=labels), None, tf.estimator.ModeKeys.PREDICT, {}).predictions

    return (integers(30, 8), integers(3)), build, evaluate


def bert_pretraining():
    import modeling
    import optimization
    import run_pretraining

    config = modeling.BertConfig(vocab_size=30, **SMALL)

    def build(accum_steps, ids, positions, words, weights, following):
        model = modeling.BertModel(config, False, ids)
        table, outputs = model.get_embedding_table(), model.get_sequence_output()
        masked = run_pretraining.get_masked_lm_output(config, outputs, table, positions, words, weights)[0]
        sentences = run_pretraining.get_next_sentence_output(config, model.get_pooled_output(), following)[0]
        if accum_steps == 1:
            loss = split(masked + sentences, (ids, positions, words, weights, following))
            return optimization.create_optimizer(loss, 1e-2, 100, 2, False), loss
        counts = [tf.reduce_sum(weights) + 1e-5, tf.shape(ids)[0]]
        return optimization.create_optimizer([masked, sentences], 1e-2, 100, 2, False, counts), masked + sentences

    def evaluate(ids, positions, words, weights, following):
        features = {"input_ids": ids, "input_mask": tf.ones_like(ids), "segment_ids": tf.zeros_like(ids)}
        features.update(masked_lm_positions=positions, masked_lm_ids=words, masked_lm_weights=weights)
        features["next_sentence_labels"] = following
        model_fn = run_pretraining.model_fn_builder(config, None, 1e-2, 100, 2, False, False)
        metric_fn, tensors = model_fn(features, None, tf.estimator.ModeKeys.EVAL, {}).eval_metrics
        return [update for _, update in metric_fn(*tensors).values()]

    weights = (RANDOM.uniform(size=(ROWS, 3)) < 0.6).astype("float32")
    return (integers(30, 8), integers(8, 3), integers(30, 3), weights, integers(2)), build, evaluate


def albert(optimizer):
    def program():
        from albert import modeling, optimization

        config = modeling.AlbertConfig(vocab_size=30, embedding_size=8, **SMALL)

        def build(accum_steps, ids, labels):
            loss = classification(modeling.AlbertModel(config, False, ids).get_pooled_output(), labels)
            loss = split(loss, (ids, labels))
            return optimization.create_optimizer(loss, 1e-2, 100, 2, False, optimizer=optimizer), loss

        return (integers(30, 8), integers(3)), build

    return program


def electra():
    from model import modeling, optimization

    config = modeling.BertConfig(vocab_size=30, **SMALL)
    rates = {"weight_decay_rate": 0.01, "layerwise_lr_decay_power": 0.8, "n_transformer_layers": 2}

    def build(accum_steps, ids, labels):
        model = modeling.BertModel(config, False, ids, tf.ones_like(ids), tf.zeros_like(ids), scope="electra")
        loss = classification(model.get_pooled_output(), labels, "task_specific/head")
        loss = split(loss, (ids, labels))
        return optimization.create_optimizer(loss, 1e-2, 100, warmup_steps=2, **rates), loss

    return (integers(30, 8), integers(3)), build


def xlnet():
    import function_builder
    import model_utils

    path = os.path.join(tempfile.mkdtemp(), "config.json")
    with open(path, "w") as file:
        sizes = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "n_token": 30}
        json.dump(dict(sizes, ff_activation="gelu", untie_r=True), file)
    flags = namespace(
        model_config_path=path,
        use_tpu=False,
        use_bfloat16=False,
        dropout=0.0,
        dropatt=0.0,
        init="normal",
        init_range=0.1,
        init_std=0.1,
        clamp_len=-1,
        summary_type="last",
        use_summ_proj=True,
        cls_scope=None,
        task_name="task",
        warmup_steps=2,
        learning_rate=1e-2,
        decay_method="poly",
        train_steps=100,
        min_lr_ratio=0.0,
        weight_decay=0.01,
        num_core_per_host=1,
        adam_epsilon=1e-6,
        clip=1.0,
        lr_layer_decay_rate=1.0,
    )

    def outputs(ids, labels):
        zeros = tf.zeros_like(ids)
        features = {"input_ids": ids, "segment_ids": zeros, "input_mask": tf.cast(zeros, tf.float32)}
        features["label_ids"] = labels
        return function_builder.get_classification_loss(flags, features, 3, False)

    def build(accum_steps, ids, labels):
        loss = split(outputs(ids, labels)[0], (ids, labels))
        return model_utils.get_train_op(flags, loss)[0], loss

    return (integers(30, 8), integers(3)), build, lambda ids, labels: outputs(ids, labels)[2]


def bert_multi_gpu():
    import custom_optimization
    import modeling

    config = modeling.BertConfig(vocab_size=30, **SMALL)

    def build(accum_steps, ids, labels):
        loss = classification(modeling.BertModel(config, False, ids).get_pooled_output(), labels)
        loss = split(loss, (ids, labels))
        return custom_optimization.create_optimizer(loss, 1e-2, 100, 2), loss

    return (integers(30, 8), integers(3)), build


def nvidia_bert(optimizer):
    def program():
        stand_in("horovod")
        stand_in("horovod.tensorflow")
        stand_in("horovod.tensorflow.compression", Compression=None)
        import modeling
        import optimization

        config = modeling.BertConfig(vocab_size=30, **SMALL)

        def build(accum_steps, ids, labels):
            collections = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.GLOBAL_STEP]
            initial = tf.constant(1, tf.int64)  # at 0, its LAMB divides by zero
            tf.get_variable("global_step", initializer=initial, trainable=False, collections=collections)
            loss = classification(modeling.BertModel(config, False, ids).get_pooled_output(), labels)
            loss = split(loss, (ids, labels))
            return optimization.create_optimizer(loss, 1e-2, 100, 2, optimizer_type=optimizer), loss

        return (integers(30, 8), integers(3)), build

    return program


def bert_ner():
    from bert_base.bert import modeling, optimization
    from bert_base.train import models

    config = modeling.BertConfig(vocab_size=30, **SMALL)

    def outputs(ids, labels):
        return models.create_model(config, False, ids, tf.ones_like(ids), tf.zeros_like(ids), labels, 4, False)

    def build(accum_steps, ids, labels):
        loss = split(outputs(ids, labels)[0], (ids, labels))
        return optimization.create_optimizer(loss, 1e-2, 100, 2, False), loss

    return (1 + integers(29, 8), integers(4, 8)), build, lambda ids, labels: outputs(ids, labels)[1::2]


def tpu_estimator():
    import modeling
    import run_classifier

    config = modeling.BertConfig(vocab_size=30, **SMALL)
    ids = integers(30, 8)
    features = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    features["label_ids"] = integers(3)
    # Its own model_fn asks for the dropout of training.
    run_classifier.tf.nn.dropout = lambda tensor, *_, **__: tensor
    builder = run_classifier.model_fn_builder
    return features, lambda accum_steps: builder(config, 3, None, 1e-2, 100, 2, False, False)


def estimator():
    from bert_base.bert import modeling
    from bert_base.train import bert_lstm_ner

    config = modeling.BertConfig(vocab_size=30, **SMALL)
    ids = 1 + integers(29, 8)
    features = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    features["label_ids"] = integers(4, 8)
    arguments = namespace(dropout_rate=1.0, lstm_size=1, cell="lstm", num_layers=1, save_summary_steps=100)
    builder = bert_lstm_ner.model_fn_builder
    return features, lambda accum_steps: builder(config, 4, None, 1e-2, 100, 2, arguments)


# What `create_optimizer` returns in addition, for a `model_fn`.
RETURNS = [
    IMPORT,
    (
        FAMILY[1][0] + r"  return train_op",
        CLIPPED.format("").replace("  train_op =", "  mean_loss = optimizer.mean_over_cycle(loss)\n  train_op =")
        + "  return train_op, mean_loss, optimizer",
        1,
    ),
]

NVIDIA = {
    "repository": "NVIDIA/DeepLearningExamples",
    "subtree": "TensorFlow/LanguageModeling/BERT",
    "edits": {
        "optimization.py": [
            TF_IMPORT,
            (
                r"(?ms)^  tvars = tf\.trainable_variables\(\).*?^(?=  return train_op)",
                CLIPPED.format("").replace("optimizer, 4", "\n      optimizer, 4"),
                1,
            ),
        ]
    },
    "note": "an empty module stands in for Horovod, which one process does not need. The program's own accumulation "
    "(`num_accumulation_steps`) clips each micro-batch and is not used. `global_step` starts at 1: at 0, LAMB's "
    "correction of the moments divides by zero, unless the counter happens to advance before it is read",
}
THROUGH = (
    "the loss is `mean_over_cycle`, and agrees with that of the full batch as the variables do; the hook is "
    "`CheckpointSaverHook`; the saver, by the scaffold, is `Saver`, which starts from a checkpoint of the plain "
    "program. Checkpoints follow steps, so the resumed run goes on from the end of a step"
)
BERT = {"repository": "google-research/bert"}
ALBERT = {"repository": "google-research/albert", "inside": "albert", "edits": {"albert/optimization.py": FAMILY}}

PROGRAMS = {
    "bert-classifier": Program(
        what="`run_classifier.create_model`, `optimization.create_optimizer`",
        edits={"optimization.py": FAMILY},
        run=bert_classifier,
        evaluates="probabilities of its `model_fn`",
        **BERT,
    ),
    "bert-tpu-estimator": Program(
        what="`run_classifier.model_fn_builder` through `TPUEstimator(use_tpu=False)`",
        edits={
            "optimization.py": RETURNS,
            "run_classifier.py": [
                IMPORT,
                (r"      train_op = optimization", "      train_op, total_loss, optimizer = optimization", 1),
                (
                    r"          train_op=train_op,\n          scaffold_fn=scaffold_fn",
                    "          train_op=train_op,\n"
                    "          training_hooks=[accum.compat.v1.CheckpointSaverHook(\n"
                    '              optimizer, params["folder"], save_steps=1)],\n'
                    "          scaffold_fn=lambda: tf.train.Scaffold(\n"
                    "              saver=accum.compat.v1.Saver(optimizer))",
                    1,
                ),
            ],
        },
        run=tpu_estimator,
        line={
            "run_classifier.py": [
                IMPORT,
                (
                    r"^      train_op = optimization",
                    "      total_loss = accum.compat.v1.split_batch(total_loss, features, 2)\n"
                    "      train_op = optimization",
                    1,
                ),
            ]
        },
        evaluates="`evaluate` and `predict`",
        estimator="TPUEstimator",
        note=THROUGH,
        **BERT,
    ),
    "bert-pretraining": Program(
        what="both losses of `run_pretraining`, `optimization.create_optimizer`",
        edits={
            "optimization.py": [
                IMPORT,
                (r"use_tpu\):", "use_tpu, weight=None):", 1),
                (FAMILY[1][0], CLIPPED.format(", weight=weight"), 1),
            ]
        },
        run=bert_pretraining,
        evaluates="the four metrics of its `model_fn`",
        **BERT,
    ),
    "albert-adamw": Program(
        what="`modeling`, `optimization.create_optimizer` with its Adam", run=albert("adamw"), **ALBERT
    ),
    "albert-lamb": Program(what="`modeling`, `optimization.create_optimizer` with LAMB", run=albert("lamb"), **ALBERT),
    "electra": Program(
        "google-research/electra",
        "`model.modeling`, `model.optimization.create_optimizer` with layerwise rates",
        {"model/optimization.py": FAMILY},
        electra,
    ),
    "xlnet": Program(
        "zihangdai/xlnet",
        "`function_builder.get_classification_loss`, `model_utils.get_train_op`",
        {
            "model_utils.py": [
                IMPORT,
                (
                    r"(?m)^  if grads_and_vars is None:",
                    "  def clip(grads_and_vars):\n"
                    "    grads, variables = zip(*grads_and_vars)\n"
                    "    return list(zip(tf.clip_by_global_norm(grads, FLAGS.clip)[0], variables))\n\n"
                    "  optimizer = accum.compat.v1.AccumOptimizer(\n"
                    "      optimizer, 4, transform=clip, count_steps=FLAGS.weight_decay > 0)\n"
                    "  if grads_and_vars is None:",
                    1,
                ),
                (
                    r"clipped, gnorm = tf\.clip_by_global_norm\(gradients, FLAGS\.clip\)",
                    "clipped, gnorm = gradients, tf.global_norm(gradients)",
                    1,
                ),
                (r"(?m)^  if FLAGS\.weight_decay > 0:\n(    .*\n)+", "", 1),
            ]
        },
        xlnet,
        evaluates="logits",
    ),
    "bert-multi-gpu": Program(
        "HaoyuHu/bert-multi-gpu",
        "`modeling`, `custom_optimization.create_optimizer`",
        {
            "custom_optimization.py": [
                IMPORT,
                (
                    r"(?ms)^    tvars = tf\.trainable_variables\(\).*?^(?=    return train_op)",
                    # The optimizer counts, and so does its caller: the run that is compared with it must too.
                    INDENTED.replace(", count_steps=True", "").replace(
                        "    train_op =",
                        "    optimizer.after_step(lambda: tf.assign_add(global_step, 1))\n    train_op =",
                    ),
                    1,
                ),
            ]
        },
        bert_multi_gpu,
        note="its optimizer advances `global_step`, and its caller adds 1 as well, so it counts each step twice and "
        "its learning rate decays twice as fast. To agree with it, the accumulating run does the same, by "
        "`after_step`. `count_steps=True` raises an error there that says so",
    ),
    "nvidia-bert-adam": Program(
        what="`modeling`, `optimization.create_optimizer` with its Adam", run=nvidia_bert("adam"), **NVIDIA
    ),
    "nvidia-bert-lamb": Program(
        what="`modeling`, `optimization.create_optimizer` with LAMB", run=nvidia_bert("lamb"), **NVIDIA
    ),
    "bert-ner": Program(
        "macanv/BERT-BiLSTM-CRF-NER",
        "`models.create_model` with its conditional random field, `optimization.create_optimizer`",
        {"bert_base/bert/optimization.py": FAMILY},
        bert_ner,
        evaluates="logits, and the labels that its random field decodes",
        note="TensorFlow sums the gradients of its random field in no fixed order, so equal runs can differ by 1e-7 "
        "of what a variable holds, and so can a resumed one",
    ),
    "bert-ner-estimator": Program(
        "macanv/BERT-BiLSTM-CRF-NER",
        "`bert_lstm_ner.model_fn_builder` through `Estimator`",
        {
            "bert_base/bert/optimization.py": RETURNS,
            "bert_base/train/bert_lstm_ner.py": [
                IMPORT,
                (r"train_op = optimization", "train_op, total_loss, optimizer = optimization", 1),
                (
                    r"training_hooks=\[logging_hook\]",
                    "scaffold=tf.train.Scaffold(saver=accum.compat.v1.Saver(optimizer)),\n"
                    "                training_hooks=[logging_hook, accum.compat.v1.CheckpointSaverHook(\n"
                    '                    optimizer, params["folder"], save_steps=1)]',
                    1,
                ),
            ],
        },
        estimator,
        line={
            "bert_base/train/bert_lstm_ner.py": [
                IMPORT,
                (
                    r"^            train_op = optimization",
                    "            total_loss = accum.compat.v1.split_batch(total_loss, features, 2)\n"
                    "            train_op = optimization",
                    1,
                ),
            ]
        },
        evaluates="`evaluate` and `predict`",
        estimator="Estimator",
        note=THROUGH,
    ),
}
