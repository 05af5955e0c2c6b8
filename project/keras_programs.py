"""Train public Keras programs with `micro_batch_size` as the only change, and write what they show to a page.

    python project/keras_programs.py run FOLDER [NAME ...] --python PYTHON
    python project/keras_programs.py page

FOLDER holds git directories of the repositories, as for programs.py; nothing of them is kept here. Imports, functions,
classes and plain constants of a program's file are run, with the values that `PROGRAMS` names in the place of its data,
its sizes and what has to be downloaded. Each program runs in a process of its own. records/keras-programs.json keeps
the results by the version of TensorFlow, each with the commit of accum's sources that it was measured with.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest.mock
import warnings
import zlib
from typing import Any, Callable, Dict, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
RECORDS = os.path.join(HERE, "records", "keras-programs.json")
PAGE = os.path.join(HERE, "pages", "keras-programs.md")
KERAS_2, KERAS_3 = "aminrz3/keras-io", "chicham/keras-io"  # copies of keras-team/keras-io, before and after Keras 3
TEXT, RECOMMENDERS = "tensorflow/text", "tensorflow/recommenders"
BYOL, EBM = "arahosu/autodidatta", "davidADSP/Generative_Deep_Learning_2nd_Edition"
CONTRASTIVE, SEGMENTATION = "beresandras/contrastive-classification-keras", "qubvel/segmentation_models"
PACKAGES = {
    BYOL: ["autodidatta"],
    CONTRASTIVE: ["models.py"],
    RECOMMENDERS: [RECOMMENDERS.replace("/", "_")],
    SEGMENTATION: [SEGMENTATION[7:]],
}
BATCH, SIZE, STEPS, TIME = 12, 5, 3, 560
ABSENT = (
    "tensorflow_datasets matplotlib gdown tensorflow_probability official imageio IPython keras_cv "
    "scann tensorflow_docs sklearn keras_applications classification_models efficientnet "
    "resnet_cifar10_v2 tensorflow_text einops cv2 dataset notebooks "
)


class Program(NamedTuple):
    """A program that trains a Keras model.

    Attributes:
      what: the file's name in an `examples` folder of keras.io, or repository and path.
      title: its name, and what meets in its train step.
      build: returns the model, the arguments of its `compile`, and a batch of data; it is given the file's names.
      kept: names of the file that are computed, such as networks, beside functions, classes and constants.
      values: what stands in the place of constants of the file.
    """

    what: str
    title: str
    build: Callable[..., Any]
    kept: str = ""
    values: Dict[str, Any] = {}


# ---------------------------------------------------------------------------------------------------------------------
# Programs


def _random(*shape):
    import numpy as np

    return np.random.RandomState(7).uniform(size=(BATCH,) + shape).astype("float32")


def _ids(count, *shape, least=0):
    import numpy as np

    return np.random.RandomState(8).randint(least, count, size=(BATCH,) + shape)


def _keras():
    import tensorflow as tf

    return tf.keras


def _adam(rate=0.01):
    """Adam that does not divide rounding by rounding where a gradient is zero."""
    return _keras().optimizers.Adam(rate, epsilon=0.01)


def _mean_metric(name="kid", **_):
    import tensorflow as tf

    class Unused(tf.keras.metrics.Mean):
        """In the place of a metric that downloads a network, and is not part of training."""

    return Unused(name=name)


def _crossentropy(**options):
    import tensorflow as tf

    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def _gan(of):
    loss = _keras().losses.BinaryCrossentropy()
    model = of.GAN(discriminator=of.discriminator, generator=of.generator, latent_dim=of.latent_dim)
    return model, {"d_optimizer": _adam(), "g_optimizer": _adam(), "loss_fn": loss}, _random(64, 64, 3)


def _wgan(of):
    model = of.WGAN(of.get_discriminator_model(), of.get_generator_model(), latent_dim=of.noise_dim)
    losses = {"d_loss_fn": of.discriminator_loss, "g_loss_fn": of.generator_loss}
    return model, dict(d_optimizer=_adam(1e-3), g_optimizer=_adam(1e-3), **losses), _random(28, 28, 1)


def _cyclegan(of):
    sizes = {"filters": 4, "num_residual_blocks": 2}
    networks = [of.get_resnet_generator(name=name, **sizes) for name in "GF"]
    networks += [of.get_discriminator(name=name, filters=4) for name in "XY"]
    names = ("gen_G_optimizer", "gen_F_optimizer", "disc_X_optimizer", "disc_Y_optimizer")
    losses = {"gen_loss_fn": of.generator_loss_fn, "disc_loss_fn": of.discriminator_loss_fn}
    return of.CycleGan(*networks), dict({name: _adam() for name in names}, **losses), (_random(32, 32, 3),) * 2


def _gan_ada(of):
    return of.GAN_ADA(), {"generator_optimizer": _adam(), "discriminator_optimizer": _adam()}, _random(64, 64, 3)


def _vae(of):
    return of.VAE(of.encoder, of.decoder), {"optimizer": _adam()}, _random(28, 28, 1)


def _vq_vae(of):
    return of.VQVAETrainer(0.1, latent_dim=4, num_embeddings=8), {"optimizer": _adam()}, _random(28, 28, 1)


def _ddim(of):
    model, images = of.DiffusionModel(of.image_size, of.widths, of.block_depth), _random(16, 16, 3)
    model.normalizer.adapt(images)
    return model, {"optimizer": _adam(), "loss": _keras().losses.MeanAbsoluteError()}, images


def _simclr(of):
    images, model = 255 * _random(32, 32, 3), of.ContrastiveModel()
    model.encoder(images)
    data = ((images, _ids(10)), (images[::-1], _ids(10)))
    return model, {"contrastive_optimizer": _adam(), "probe_optimizer": _adam()}, data


def _nnclr(of):
    images = 255 * _random(32, 32, 3)
    data = ((images, _ids(10)), (images[::-1], _ids(10)))
    model = of.NNCLR(temperature=0.1, queue_size=40)
    return model, {"contrastive_optimizer": _adam(), "probe_optimizer": _adam()}, data


def _of_algorithms(name, **options):
    """A class of contrastive-classification-keras, with the networks of its train.py, smaller and without noise."""

    def build(of):
        import tensorflow as tf

        layers = tf.keras.layers
        shapes = (32, 32, 3), (32, 32, 3), (32, 32, 3), (8,), (8,)
        inner = [layers.Rescaling(1 / 255)], [layers.Rescaling(1 / 255)]
        inner += ([layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(8, activation="relu")],)
        inner += [layers.Dense(8, activation="relu"), layers.Dense(8)], [layers.Dense(10)]
        parts = [tf.keras.Sequential([layers.Input(shape), *one]) for shape, one in zip(shapes, inner)]
        model = getattr(of, name)(*parts, **options)
        images = 255 * _random(32, 32, 3)
        data = ((images, _ids(10)), (images[::-1], _ids(10)))
        return model, {"contrastive_optimizer": _adam(), "probe_optimizer": _adam()}, data

    return build


def _simsiam(of):
    layers = _keras().layers
    stack = [_keras().Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()]
    encoder = _keras().Sequential(stack + [layers.Flatten(), layers.Dense(of.PROJECT_DIM), layers.BatchNormalization()])
    return of.SimSiam(encoder, of.get_predictor()), {"optimizer": _adam()}, (_random(8, 8, 3), _random(8, 8, 3)[::-1])


def _supervised_contrastive(of):
    layers = _keras().layers
    encoder = _keras().Sequential([_keras().Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(8)])
    model = of.add_projection_head(encoder)
    return model, {"optimizer": _adam(), "loss": of.SupervisedContrastiveLoss(0.05)}, (_random(8, 8, 3), _ids(3))


def _siamese(of):
    layers = _keras().layers
    inputs = [_keras().Input((8, 8, 3)) for _ in range(3)]
    stack = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dense(4)]
    embedding = _keras().Sequential([_keras().Input((8, 8, 3))] + stack)
    distances = of.DistanceLayer()(*map(embedding, inputs))
    model = of.SiameseModel(_keras().Model(inputs, distances))
    return model, {"optimizer": _adam()}, ((_random(8, 8, 3), _random(8, 8, 3)[::-1], _random(8, 8, 3) ** 2),)


def _switch(of):
    model = of.create_classifier()
    return model, {"optimizer": _adam(), "loss": "sparse_categorical_crossentropy"}, (_ids(50, 10), _ids(2))


def _captcha(of):
    of.char_to_num = _keras().layers.StringLookup(vocabulary=list("abcdef"), mask_token=None)
    model = of.build_model()
    return model, {"optimizer": _adam()}, ({"image": _random(40, 20, 1), "label": _ids(6, 4).astype("float32")},)


def _centralized(of):
    return (
        of.model,
        {"optimizer": of.GCRMSprop(0.001, epsilon=0.01), "loss": "binary_crossentropy"},
        (_random(300, 300, 3), _ids(2)),
    )


def _distillation(of):
    losses = {"student_loss_fn": _crossentropy(), "distillation_loss_fn": _keras().losses.KLDivergence()}
    metrics = [_keras().metrics.SparseCategoricalAccuracy()]
    model = of.Distiller(student=of.student, teacher=of.teacher)
    return model, dict(optimizer=_adam(), metrics=metrics, **losses), (_random(28, 28, 1), _ids(10))


def _vision_transformer(of):
    of.data_augmentation.layers[0].adapt(_random(32, 32, 3))
    return of.create_vit_classifier(), {"optimizer": _adam(), "loss": _crossentropy()}, (_random(32, 32, 3), _ids(10))


def _asr(of):
    sizes = {"num_hid": 8, "num_feed_forward": 8, "num_layers_enc": 1, "source_maxlen": 20, "target_maxlen": 6}
    model = of.Transformer(**sizes)
    data = {"source": _random(20, 5), "target": _ids(10, 6)}
    model([data["source"], data["target"][:, :-1]])
    loss = _keras().losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return model, {"optimizer": _adam(), "loss": loss}, data


def _captions(of):
    import tensorflow as tf

    layers = tf.keras.layers
    stack = [layers.Input((8, 8, 3)), layers.Conv2D(8, 3, 2, activation="relu"), layers.Reshape((-1, 8))]
    parts = of.TransformerEncoderBlock(8, 8, 1), of.TransformerDecoderBlock(8, 8, 2)
    model = of.ImageCaptioningModel(tf.keras.Sequential(stack), *parts, num_captions_per_image=2)
    data = _random(8, 8, 3), _ids(20, 2, of.SEQ_LENGTH)
    model.compile(optimizer=_adam(), loss=_crossentropy(reduction="none"))
    model._compute_caption_loss_and_acc(model.cnn_model(data[0]), data[1][:, 0], training=True)
    return model, {"optimizer": _adam(), "loss": _crossentropy(reduction="none")}, data


def _transformer(of):
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 16, "input_vocab_size": 20, "target_vocab_size": 20}
    model, data = of.Transformer(**sizes), ((_ids(20, 7), _ids(20, 6)), _ids(20, 6))
    model(data[0])
    return model, {"optimizer": _adam(), "loss": of.masked_loss, "metrics": [of.masked_accuracy]}, data


def _translation(of):
    words = of.tf.keras.layers.TextVectorization(vocabulary=["[START]", "[END]"] + list("abcdefghij"))
    model, data = of.Translator(8, words, words), ((_ids(12, 7), _ids(12, 6)), _ids(12, 6))
    model(data[0])
    return model, {"optimizer": _adam(), "loss": of.masked_loss, "metrics": [of.masked_acc]}, data


def _retrieval(of):
    import tensorflow as tf
    from tensorflow_recommenders.tasks import retrieval

    of.tfrs.Model, of.__dict__["task"] = of.tfrs.models.Model, retrieval.Retrieval()
    words = [str(number) for number in range(20)]

    def tower():
        layers = tf.keras.layers
        return tf.keras.Sequential([layers.StringLookup(vocabulary=words, mask_token=None), layers.Embedding(21, 4)])

    data = {name: tf.constant([str(one) for one in _ids(20)]) for name in ("user_id", "movie_title")}
    towers = tower(), tower()
    for one in towers:
        one(data["user_id"])
    return of.NoBaseClassMovielensModel(*towers), {"optimizer": tf.keras.optimizers.Adagrad(0.1)}, data


def _dice(of):
    import tensorflow as tf

    layers = tf.keras.layers
    modules = {"backend": tf.keras.backend, "layers": layers, "models": tf.keras.models, "utils": tf.keras.utils}
    of.Loss.set_submodules(**modules) if hasattr(of.Loss, "set_submodules") else None
    stack = [tf.keras.Input((16, 16, 3)), layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization()]
    model = tf.keras.Sequential(stack + [layers.ReLU(), layers.Conv2D(1, 1, activation="sigmoid")])
    loss = of.DiceLoss() + of.BinaryFocalLoss()
    return model, {"optimizer": _adam(), "loss": loss}, (_random(16, 16, 3), _ids(2, 16, 16, 1).astype("float32"))


def _byol(of):
    layers = _keras().layers
    stack = [layers.Input((16, 16, 3)), layers.Conv2D(4, 3, 2), layers.BatchNormalization(), layers.ReLU()]
    model = of.BYOL(_keras().Sequential(stack), proj_hidden_dim=8, pred_hidden_dim=8, output_dim=4)
    model.build((None, 16, 16, 3))
    return model, {"optimizer": _adam()}, _random(16, 16, 6)


def _energy(of):
    return of.EBM(), {"optimizer": _adam(), "run_eagerly": True}, 2 * _random(32, 32, 1) - 1


IMAGES = {"input_img_size": (32, 32, 3)}
VIT = {"image_size": 24, "num_patches": 16, "transformer_layers": 2, "mlp_head_units": [16], "num_classes": 10}
SWITCH = {
    "vocab_size": 50,
    "num_tokens_per_example": 10,
    "num_experts": 3,
    "num_tokens_per_batch": 10 * BATCH,
    "embed_dim": 8,
}
CONTRAST = {"image_size": 32, "width": 8}
QUEUE = {"momentum_coeff": 0.9, "temperature": 0.1}
SAMPLED = "encoder_inputs x z_mean z_log_var z encoder latent_inputs decoder_outputs decoder"
PROGRAMS = {
    "dcgan": Program("generative/dcgan_overriding_train_step.py", "DCGAN", _gan, "discriminator generator"),
    "wgan-gp": Program("generative/wgan_gp.py", "WGAN with gradient penalty", _wgan),
    "cyclegan": Program("generative/cyclegan.py", "CycleGAN", _cyclegan, "kernel_init gamma_init adv_loss_fn", IMAGES),
    "gan-ada": Program("generative/gan_ada.py", "GAN with adaptive augmentation", _gan_ada, values={"width": 4}),
    "vae": Program("generative/vae.py", "VAE", _vae, SAMPLED),
    "energy": Program(
        EBM + "/notebooks/07_ebm/01_ebm/ebm.ipynb",
        "energy-based model, runs eagerly",
        _energy,
        "model ebm_input x ebm_output",
        {"BATCH_SIZE": BATCH, "STEPS": 2},
    ),
    "vq-vae": Program("generative/vq_vae.py", "VQ-VAE", _vq_vae),
    "ddim": Program("generative/ddim.py", "DDIM", _ddim, values={"image_size": 16, "widths": [4, 8], "block_depth": 1}),
    "simclr": Program("vision/semisupervised_simclr.py", "SimCLR", _simclr, values=CONTRAST),
    "nnclr": Program("vision/nnclr.py", "NNCLR, a queue", _nnclr, values={"input_shape": (32, 32, 3), "width": 8}),
    "moco": Program(CONTRASTIVE, "MoCo, a queue", _of_algorithms("MoCo", queue_size=60, **QUEUE)),
    "dino": Program(CONTRASTIVE, "DINO, a teacher", _of_algorithms("DINO", sharpening=0.5, **QUEUE)),
    "byol": Program(BYOL + "/autodidatta/models/byol.py", "BYOL, a target network", _byol),
    "twist": Program(CONTRASTIVE, "TWIST", _of_algorithms("TWIST")),
    "simsiam": Program(
        "vision/simsiam.py", "SimSiam", _simsiam, values={"PROJECT_DIM": 8, "LATENT_DIM": 4, "WEIGHT_DECAY": 5e-4}
    ),
    "supervised-contrastive": Program(
        "vision/supervised-contrastive-learning.py",
        "supervised contrastive loss",
        _supervised_contrastive,
        values={"input_shape": (8, 8, 3), "projection_units": 6},
    ),
    "siamese": Program("vision/siamese_network.py", "triplet loss", _siamese),
    "switch": Program("nlp/text_classification_with_switch_transformer.py", "Switch Transformer", _switch, "", SWITCH),
    "captcha": Program("vision/captcha_ocr.py", "captcha OCR, CTC", _captcha, "", {"img_width": 40, "img_height": 20}),
    "centralization": Program("vision/gradient_centralization.py", "gradient centralisation", _centralized, "model"),
    "distillation": Program("vision/knowledge_distillation.py", "distillation", _distillation, "teacher student"),
    "vit": Program(
        "vision/image_classification_with_vision_transformer.py",
        "vision transformer with augmentation",
        _vision_transformer,
        "data_augmentation transformer_units",
        VIT,
    ),
    "speech": Program("audio/transformer_asr.py", "speech recognition, masked loss", _asr),
    "captions": Program(
        "vision/image_captioning.py", "image captions", _captions, "", {"EMBED_DIM": 8, "SEQ_LENGTH": 6}
    ),
    "transformer": Program(TEXT + "/docs/tutorials/transformer.ipynb", "Transformer, masked mean", _transformer),
    "translation": Program(TEXT + "/docs/tutorials/nmt_with_attention.ipynb", "NMT, masked mean", _translation),
    "retrieval": Program(
        RECOMMENDERS + "/docs/examples/basic_retrieval.ipynb", "two towers, in-batch negatives", _retrieval
    ),
    "dice": Program(SEGMENTATION + "/segmentation_models/losses.py", "Dice of the batch", _dice),
}

# ---------------------------------------------------------------------------------------------------------------------
# A program in its own process


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules in the place of those that are not installed."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in ABSENT.split() else None

    def create_module(self, spec):
        module = unittest.mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module):
        pass


def statements(source, kept):
    """Return the statements of a file that define, import, or compute a name that is kept."""

    def is_constant(node):
        names = "Name Load Store BinOp List Tuple Dict Constant UnaryOp Num Str NameConstant Attribute operator"
        return all(
            type(one).__name__ in names or isinstance(one, (ast.operator, ast.unaryop)) for one in ast.walk(node)
        )

    def is_run(node):
        if isinstance(node, ast.Assign):
            names = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            return bool(names & set(kept)) or is_constant(node.value)
        return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))

    tree = ast.parse(source)
    tree.body = [node for node in tree.body if is_run(node)]
    return tree


def _cells(text):
    """Return the code of a notebook, without what IPython alone understands."""
    cells = []
    for cell in json.loads(text)["cells"]:
        source = "".join(line for line in cell["source"] if not line.startswith(("%", "!")))
        try:
            ast.parse(source)
        except SyntaxError:
            continue
        cells += [source] if cell["cell_type"] == "code" else []
    return "\n\n".join(cells)


def _names_of(program, path):
    """Run a program's file up to where it would read data and train."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    tree = statements(_cells(text) if path.endswith(".ipynb") else text, program.kept.split())
    module = types.ModuleType("program")
    module.__package__ = "segmentation_models" if SEGMENTATION in program.what else None  # its imports are relative
    os.environ["SM_FRAMEWORK"] = "tf.keras"
    sys.modules["program"] = module
    for node in tree.body:
        one = ast.Module([node], []) if sys.version_info >= (3, 8) else ast.Module([node])  # novermin
        try:
            exec(compile(one, path, "exec"), module.__dict__)
        except Exception:
            # What can't be computed without data is not needed, unless it is named.
            if isinstance(node, ast.ClassDef) or not isinstance(node, (ast.Assign, ast.FunctionDef)):
                raise
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            if names & set(program.kept.split()):
                raise
        module.__dict__.update(dict(program.values, batch_size=BATCH))
    if "KID" in module.__dict__:
        module.__dict__["KID"] = _mean_metric
    return module


def _is_keras_3():
    import tensorflow as tf

    return tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 16)


def _fix_draws():
    """Let what TensorFlow draws depend on the place in the code alone, and leave the dropout of Keras 2 out."""
    import random

    import tensorflow as tf

    random.sample = lambda population, count: list(population)[:count]
    if not _is_keras_3():
        tf.keras.layers.Dropout.call = lambda self, inputs, training=None: inputs

    def replaced(stateless):
        def draw(shape, *args, **options):
            frame = sys._getframe(1)
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}".encode()
            options.pop("seed", None)
            names = "minval maxval dtype name" if "uniform" in stateless.__name__ else "mean stddev dtype name"
            return stateless(shape, [zlib.crc32(place) % 10**6, 1], **dict(zip(names.split(), args), **options))

        return draw

    for module in (tf.random, tf.compat.v2.random):
        module.uniform = replaced(tf.random.stateless_uniform)
        module.normal = replaced(tf.random.stateless_normal)


def _trained(program, path, rounding=0.0, **options):
    """Train the program for some steps. Returns the initial weights, those after each step, the logs and warnings."""
    import numpy as np
    import tensorflow as tf

    import accum

    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(1)
    model, compiled, data = program.build(_names_of(program, path))
    first = [np.array(one) for one in model.get_weights()]
    random = np.random.RandomState(3)
    if rounding:
        model.set_weights([one * (1 + rounding * random.choice([-1, 1], size=one.shape)) for one in first])
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if options:
            model = accum.GradientAccumulateModel.from_model(model, **options)
        if compiled is not None:
            model.compile(**compiled)
        if _is_keras_3():
            model.jit_compile = False  # what the programs compile does not take it, and XLA takes minutes here
        tf.keras.utils.set_random_seed(2)
        after, logs = [], []
        for _ in range(STEPS):
            dataset = tf.data.Dataset.from_tensors(data)
            history = model.fit(dataset, verbose=0).history
            logs.append({name: float(np.mean(values)) for name, values in history.items()})
            after.append([np.array(one) for one in model.get_weights()])
        said = [str(one.message) for one in caught if "[accum:" in str(one.message)]
    return first, after, logs, said


def _deviation(ours, theirs):
    """Return how far any of the arrays is off at most, in units of its largest value if that is above 1."""
    import numpy as np

    pairs = [(np.asarray(one, "float64"), np.asarray(other, "float64")) for one, other in zip(ours, theirs)]
    pairs = [(one, other) for one, other in pairs if one.size]
    return max(float(np.max(np.abs(one - other)) / max(1.0, np.max(np.abs(other)))) for one, other in pairs)


def work(name, path, out):
    """Train a program on full batches and in micro-batches, and write the record."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    import accum  # noqa: F401

    tf.keras.Sequential()  # Keras imports what it finds, before there are empty modules
    sys.meta_path.append(_Absent())

    program = PROGRAMS[name]
    _fix_draws()
    first, full, full_logs, _ = _trained(program, path)

    def compared(**options):
        try:
            start, after, logs, said = _trained(program, path, **options)
        except Exception as error:
            return {"error": (str(error).strip().splitlines() or [repr(error)])[-1].strip()}
        if len(start) != len(first) or _deviation(start, first):
            raise ValueError("the initial weights differ: let `build` create them")
        pairs = [(one, other) for ours, theirs in zip(after, full) for one, other in zip(ours, theirs)]
        shown = [[logs[step][key], full_logs[step][key]] for step in range(STEPS) for key in full_logs[step]]
        logged = _deviation([one for one, _ in shown], [other for _, other in shown]) if shown else 0.0
        return {"off": _deviation(*zip(*pairs)), "logs": logged, "said": said}

    record = {"tensorflow": tf.__version__, "weights": len(first)}
    record["moved"] = _deviation(full[-1], first)
    record["split"] = compared(micro_batch_size=SIZE)
    record["each"] = compared(micro_batch_size=SIZE, whole_batch=())
    record["rounding"] = compared(rounding=1e-7)
    with open(out, "w") as file:
        json.dump(record, file)


# ---------------------------------------------------------------------------------------------------------------------
# Records and the page


def _repository(program, is_keras_3):
    """Return the repository of a program, and the path in it."""
    parts = program.what.split("/")
    if program.what == CONTRASTIVE:
        return CONTRASTIVE, "algorithms.py"
    for repository in (TEXT, RECOMMENDERS, SEGMENTATION, BYOL, EBM):
        if program.what.startswith(repository + "/"):
            return repository, "/".join(parts[2:])
    return (KERAS_3 if is_keras_3 else KERAS_2), "examples/" + program.what


def _output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout


def run(folder, names, python):
    """Train programs, and keep what they show."""
    import programs

    version = programs.version_of(python)
    kept = records()
    for name in names or PROGRAMS:
        repository, path = _repository(PROGRAMS[name], int(version.split(".")[1]) >= 16)
        git = "git", "--git-dir", programs.git_directory(folder, repository)
        with tempfile.TemporaryDirectory() as tree:
            wanted = [path] + PACKAGES.get(repository, [])
            subprocess.run(["tar", "x", "-C", tree], input=_output(*git, "archive", "HEAD", *wanted), check=True)
            out = os.path.join(tree, "out.json")
            command = ["timeout", str(TIME), python, __file__, "work", name, os.path.join(tree, path), out]
            environment = dict(os.environ, PYTHONPATH=os.pathsep.join([ROOT, tree]))
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if not os.path.exists(out):
                print(name, version, "can't run:", programs.reason_in(done.stdout.decode(errors="replace")), flush=True)
                continue
            with open(out) as file:
                record = json.load(file)
        commit = _output(*git, "rev-parse", "--short=10", "HEAD").decode().strip()
        record.update(repository=repository, path=path, commit=commit, accum=programs.sources())
        kept.setdefault(name, {})[version] = record
        print(name, version, {key: record[key] for key in ("split", "each", "rounding")}, flush=True)
        with open(RECORDS, "w", encoding="utf-8") as file:
            json.dump(kept, file, indent=1, sort_keys=True)
            file.write("\n")
    return 0


def records():
    if not os.path.exists(RECORDS):
        return {}
    with open(RECORDS, encoding="utf-8") as file:
        return json.load(file)


HEAD = """# Real Keras programs

Generated by `project/keras_programs.py`. Each program runs from its own repository, with its own train step or loss,
small sizes and made-up data: {steps} steps on full batches of {batch}, and the same steps with
`micro_batch_size={size}` as the only change. Initial weights and random numbers are the same; on Keras 2, dropout is
left out, and on Keras 3, XLA. Modules that are not installed, and that the training does not call, are empty ones.

- **Agrees**: how far any weight, moving statistic, metric or entry of the logs is off the full batch after any step, at
  most, in units of its largest value if that is above 1.
- **Rounding**: the same for a full batch whose initial weights are changed by 1e-7 of themselves.
- **`whole_batch=()`**: the same for the train step on each micro-batch, or the code of the error.
- **Said**: the codes of the warnings, which [troubleshooting](../../docs/troubleshooting.md) explains. With
  `not-split`, a part is computed for the whole batch at once.
- **accum**: the last commit of accum's sources in the tree that ran, and its date.

| Program | File | Commit | TensorFlow | Agrees | Rounding | `whole_batch=()` | Said | accum |
|---|---|---|---|---|---|---|---|---|
"""


def page(kept):
    """Return the page about the records."""
    rows = []
    for name, program in PROGRAMS.items():
        for version, record in sorted(kept.get(name, {}).items()):
            said = ", ".join(f"`{code}`" for code in codes_of(record["split"]))
            file = f"{record['repository']}, {record['path'].replace('examples/', '')}"
            cells = [program.title, file, f"`{record['commit']}`", version]
            cells += [_shown(record[what]) for what in ("split", "rounding", "each")] + [said, record["accum"]]
            rows.append("| " + " | ".join(cells) + " |\n")
    return HEAD.format(steps=STEPS, batch=BATCH, size=SIZE) + "".join(rows)


def codes_of(result):
    """Return the codes of the warnings and the error of a training."""
    texts = [*result.get("said", ()), result.get("error", "")]
    return sorted({code for text in texts for code in re.findall(r"\[accum: ([\w-]+)\]", text)})


def _shown(result):
    """Return a deviation, or what the error is."""
    if "off" in result:
        return f"{max(result['off'], result['logs']):.0e}"
    return ", ".join(f"`{code}`" for code in codes_of(result)) or "an error of TensorFlow"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    command = commands.add_parser("run", help="train programs")
    command.add_argument("folder")
    command.add_argument("names", nargs="*", metavar="NAME")
    command.add_argument("--python", default=sys.executable)
    command = commands.add_parser("work")
    for argument in ("name", "path", "out"):
        command.add_argument(argument)
    commands.add_parser("page", help="write pages/keras-programs.md")
    arguments = parser.parse_args()
    if arguments.command == "page":
        with open(PAGE, "w", encoding="utf-8") as file:
            file.write(page(records()))
        return 0
    if arguments.command == "work":
        return work(arguments.name, arguments.path, arguments.out)
    return run(arguments.folder, arguments.names, arguments.python)


if __name__ == "__main__":
    sys.exit(main())
