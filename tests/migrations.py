"""Code that accumulates by other libraries, with what `python -m accum migrate` makes of it, or why it leaves it."""

import collections

Pair = collections.namedtuple("Pair", "name before after")
Left = collections.namedtuple("Left", "name code line reason")


def _pair(name, *lines):
    """Lines that begin with "-" are of before, with "+" of after, the others of both."""
    before = [line[2:] for line in lines if line[0] != "+"]
    after = [line[2:] for line in lines if line[0] != "-"]
    return Pair(name, "\n".join(before) + "\n", "\n".join(after) + "\n")


PAIRS = [
    _pair(
        "model",
        "- from gradient_accumulator import GradientAccumulateModel  # K micro-batches",
        "+ import accum  # K micro-batches",
        "  inputs = tf.keras.Input((3,))",
        "- model = GradientAccumulateModel(",
        "+ model = accum.GradientAccumulateModel(",
        "      accum_steps=2,",
        "      inputs=inputs,",
        "      outputs=tf.keras.layers.Dense(1, use_bias=False)(inputs),",
        '+     last_cycle="carry",',
        '+     micro_batch_weight="equal",',
        "  )",
    ),
    _pair(
        "model-of-0.2",
        "- from gradient_accumulator.GAModelWrapper import GAModelWrapper as Wrapper",
        "+ import accum",
        "- model = Wrapper(n_gradients=2, use_acg=False, inputs=i, outputs=o)",
        "+ model = accum.GradientAccumulateModel(accum_steps=2, use_agc=False, inputs=i, outputs=o, "
        'last_cycle="carry", micro_batch_weight="equal")',
    ),
    _pair(
        "optimizer",
        "- import gradient_accumulator as ga",
        "+ import accum",
        "- optimizer = ga.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)",
    ),
    _pair(
        "optimizer-of-0.3.0",
        "- from gradient_accumulator.GAOptimizerWrapper import GAOptimizerWrapper",
        "+ import accum",
        '- optimizer = GAOptimizerWrapper(tf.keras.optimizers.SGD(0.1), reduction="SUM")',
        '+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), reduction="SUM", accum_steps=4)',
    ),
    _pair(
        "layers",
        "- from gradient_accumulator import AccumBatchNormalization, unitwise_norm",
        "- from gradient_accumulator.utils import replace_batchnorm_layers",
        "+ import accum",
        "- layer = AccumBatchNormalization(2, 0.9, epsilon=1e-4)",
        "+ layer = accum.AccumBatchNormalization(accum_steps=2, momentum=0.9, epsilon=1e-4)",
        "- both = lambda model, x: (replace_batchnorm_layers(model, 2), unitwise_norm(x))",
        "+ both = lambda model, x: (accum.replace_batchnorm_layers(model, 2), accum.unitwise_norm(x))",
    ),
    _pair(
        "h2g-net",
        "- from utils.accum_optimizers import AccumOptimizer",
        "+ import accum.compat.v1",
        "- optimizer = AccumOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), steps_per_update=2)",
        "+ optimizer = accum.compat.v1.AccumOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), accum_steps=2)",
    ),
    _pair(
        "h2g-net-adam",
        "- from .accum_optimizers import AdamAccumulated",
        "+ import accum",
        "+ import tensorflow as tf",
        "- optimizer = AdamAccumulated(2, 0.1, epsilon=0.05)",
        "+ optimizer = accum.GradientAccumulateOptimizer("
        "tf.keras.optimizers.Adam(learning_rate=0.1, epsilon=2 * 0.05), accum_steps=2)",
    ),
    _pair(
        "h2g-net-adam-graph",
        "- from accum_optimizers import AdamAccumulated",
        "+ import accum.compat.v1",
        "  tf.compat.v1.disable_eager_execution()",
        "- optimizer = AdamAccumulated(accumulation_steps=K, lr=0.1)",
        "+ optimizer = accum.compat.v1.AdamAccumulated(accumulation_steps=K, lr=0.1, epsilon=K * 1e-7)",
    ),
    _pair(
        "runai",
        "  import tensorflow as tf",
        "- import runai.ga",
        "+ import accum",
        "- wrapped = runai.ga.keras.optimizers.Optimizer(tf.keras.optimizers.SGD(0.1), 2)",
        "+ wrapped = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), 2)",
        "- optimizer = runai.ga.keras.optimizers.SGD(lr=0.1, steps=2)",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(learning_rate=0.1), accum_steps=2)",
    ),
    _pair(
        "tensorpack",
        "- from tensorpack.tfutils.optimizer import AccumGradOptimizer",
        "+ import accum.compat.v1",
        "- optimizer = AccumGradOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), niter=2)",
        "+ optimizer = accum.compat.v1.AccumOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), accum_steps=2, "
        'reduction="sum", count_micro_steps=True)',
    ),
    _pair(
        "keras-3",
        "  from tensorflow import keras",
        "+ import accum",
        "  RATE = 1e-1",
        "- optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)",
        "+ optimizer = accum.GradientAccumulateOptimizer(keras.optimizers.SGD(RATE), accum_steps=2)",
        "  plain = lambda rate: (keras.optimizers.SGD(rate, gradient_accumulation_steps=None), keras.optimizers.Adam)",
    ),
    _pair(
        "comments-and-no-last-comma",
        "- from gradient_accumulator import GradientAccumulateModel",
        "+ import accum",
        "- model = GradientAccumulateModel(",
        "+ model = accum.GradientAccumulateModel(",
        "      accum_steps=2,  # two",
        "      inputs=i,",
        "-     outputs=o  # of the net",
        "+     outputs=o,  # of the net",
        '+     last_cycle="carry",',
        '+     micro_batch_weight="equal"',
        "  )",
    ),
    _pair(
        "white-space-that-libcst-loses",
        "  try :",
        "-     from gradient_accumulator import GradientAccumulateOptimizer as Mine",
        "+     import accum",
        "-     make = lambda  : Mine('sgd', 4)",
        "+     make = lambda  : accum.GradientAccumulateOptimizer('sgd', 4)",
        "  except (ValueError, TypeError) :",
        "      pass",
    ),
    _pair(
        "one-argument-a-line",
        "- from gradient_accumulator.layers import AccumBatchNormalization",
        "- from gradient_accumulator import GAOptimizerWrapper",
        "+ import accum",
        "- optimizer = GAOptimizerWrapper(",
        "+ optimizer = accum.GradientAccumulateOptimizer(",
        "      inner,  # the one of before",
        "+     accum_steps=4,",
        "  )",
        "- x = AccumBatchNormalization( 2, name = 'x' ) (x)",
        "+ x = accum.AccumBatchNormalization( accum_steps=2, name = 'x' ) (x)",
    ),
    _pair(
        "in-a-function",
        "  def make():",
        "-     from gradient_accumulator import GradientAccumulateOptimizer",
        "+     import accum",
        "-     return GradientAccumulateOptimizer('sgd', 4)",
        "+     return accum.GradientAccumulateOptimizer('sgd', 4)",
    ),
    _pair(
        "beside-other-names",
        "  import accum.compat.v1",
        "  import os; import sys",
        "  from tensorpack.tfutils.optimizer import (",
        "-     AccumGradOptimizer,",
        "      apply_grad_processors,",
        "  )",
        "- make = lambda: AccumGradOptimizer(optimizer, 4), apply_grad_processors",
        "+ make = lambda: accum.compat.v1.AccumOptimizer(optimizer, 4, "
        'reduction="sum", count_micro_steps=True), apply_grad_processors',
    ),
    _pair(
        "nested",
        "- from gradient_accumulator import AccumBatchNormalization as BN, GradientAccumulateModel",
        "+ import accum",
        "- model = GradientAccumulateModel(2, inputs=i, outputs=BN(2)(i))",
        "+ model = accum.GradientAccumulateModel(2, inputs=i, outputs=accum.AccumBatchNormalization(accum_steps=2)(i), "
        'last_cycle="carry", micro_batch_weight="equal")',
    ),
]

UNTOUCHED = [
    "from optax import GradientAccumulateOptimizer  # gradient_accumulator\nGradientAccumulateOptimizer(1)\n",
    "from transformers import TrainingArguments\nTrainingArguments(gradient_accumulation_steps=4)\n",
    "from keras.optimizers import Adam\nassert isinstance(gradient_accumulation_steps, int) and Adam(rate)\n",
    "class AccumGradOptimizer: pass\nAccumGradOptimizer(1, niter=4)\n",
    "import horovod.tensorflow as hvd\nhvd.DistributedOptimizer(o, backward_passes_per_step=1)\n",
    "def f(runai):\n    return runai.ga.keras.optimizers.Adam(steps=4)\n",
    "from gradient_accumulator import GradientAccumulateModel\n",  # for others to import from here
    "import gradient_accumulator\nx.GradientAccumulateModel(GradientAccumulateModel=4)\n",
]

GA = "from gradient_accumulator import GradientAccumulateOptimizer as O, GradientAccumulateModel as M\n"
H2G = "from accum_optimizers import AccumOptimizer, AdamAccumulated\n"
RUNAI = "from runai.ga.keras import optimizers\n"
KERAS = "from keras import optimizers\n"

LEFT = [
    Left("unpacked", GA + "O(**options)\n", 2, "what `*` and `**` unpack"),
    Left("sum-or-mean", GA + 'O("sgd", 4, reduction="SUM")\n', 2, "0.5 takes the mean whatever is given"),
    Left("default-of-k", GA + 'O("sgd")\n', 2, "4 by default in 0.3.1"),
    Left("clipping", GA + 'O("sgd", 4, clipnorm=1.0)\n', 2, "`clipnorm` is no argument here"),
    Left("adaptive-clipping", GA + "M(4, use_agc=True, inputs=i, outputs=o)\n", 2, "another clipping"),
    Left(
        "unknown",
        "from gradient_accumulator.GAModelWrapperV2 import GAModelWrapperV2\nGAModelWrapperV2(4)\n",
        2,
        "nothing",
    ),
    Left("method", GA + "M.from_config(config)\n", 2, "`M.from_config`: nothing is known of it"),
    Left("dynamic", RUNAI + "getattr(optimizers, name)(steps=4)\n", 2, "`optimizers`: it is not called here"),
    Left("subclass", GA + "class Mine(M): pass\n", 2, "`M`: it is not called here"),
    Left("many", GA + "M(1, 2, 3, 4, 5, 6, inputs=i)\n", 2, "5 positional arguments at most"),
    Left(
        "batch-norm", "import gradient_accumulator as ga\nga.layers.AccumBatchNormalization(momentum=0.9)\n", 2, "0.3"
    ),
    Left("star", "from gradient_accumulator import *\nGradientAccumulateOptimizer('sgd', 4)\n", 2, "import it by name"),
    Left("star-module", "from tensorpack import *\noptimizer.AccumGradOptimizer(o, 4)\n", 2, "import it by name"),
    Left("shadowed", GA + "O('sgd', 4)\nO = 3\n", 2, "bound to something else"),
    Left("later", GA + "def f(): O('sgd', 4)\nfrom mine import O\n", 2, "bound to something else"),
    Left(
        "other-fallback",
        "try:\n    import gradient_accumulator as g\nexcept E:\n    g = 0\ng.GradientAccumulateModel(4)\n",
        5,
        "else",
    ),
    Left("f-string", GA + "x = f'{M(4, inputs=i, outputs=o)}'\n", 2, "it stands in an f-string"),
    Left("taken", GA + "O('sgd', 4)\ndef f(accum): pass\n", 2, "`accum` is a name of your own"),
    Left(
        "one-line",
        "if x: from gradient_accumulator import GAModelWrapper\nGAModelWrapper(4, a=b)\n",
        2,
        "shares a line",
    ),
    Left("decay", H2G + "AdamAccumulated(4, decay=0.1)\n", 2, "`decay` acts on each micro-batch"),
    Left("expression", H2G + "AdamAccumulated(next(k))\n", 2, "not a plain number or name"),
    Left("rate", H2G + "AdamAccumulated(4, rate())\n", 2, "a schedule counts micro-batches"),
    Left("inner-clipping", H2G + "AccumOptimizer(o, 4, clipnorm=1.0)\n", 2, "`clipnorm` is not the inner optimizer's"),
    Left(
        "runai-clipping", RUNAI + "optimizers.Adam(4, clipvalue=1.0)\n", 2, "`clipvalue` clips each micro-batch there"
    ),
    Left("runai-adagrad", RUNAI + "optimizers.Adagrad(4)\n", 2, "other defaults"),
    Left("runai-decay", RUNAI + "optimizers.SGD(4, decay=0.1)\n", 2, "use a schedule"),
    Left(
        "schedule",
        KERAS + "optimizers.SGD(rate(), gradient_accumulation_steps=4)\n",
        2,
        "a schedule counts micro-batches",
    ),
    Left("bound-twice", KERAS + "r = 1\nr = s()\noptimizers.SGD(r, gradient_accumulation_steps=4)\n", 4, "a schedule"),
    Left(
        "comment", KERAS + "optimizers.SGD(\n    0.1,  # a\n    gradient_accumulation_steps=4)\n", 2, "a comment stands"
    ),
    Left("ema", KERAS + "optimizers.SGD(gradient_accumulation_steps=4, use_ema=True)\n", 2, "`use_ema` acts on each"),
    Left(
        "jax",
        'os.environ["KERAS_BACKEND"] = "jax"\n' + KERAS + "optimizers.SGD(gradient_accumulation_steps=4)\n",
        3,
        "back",
    ),
    Left(
        "horovod",
        "import horovod.keras as h\nh.DistributedOptimizer(o, backward_passes_per_step=k)\n",
        2,
        "`transform=`",
    ),
]
