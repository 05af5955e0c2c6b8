"""Code that accumulates with other libraries, and the result of `python -m accum migrate` or why it is left alone."""

from typing import NamedTuple


class Pair(NamedTuple):
    name: str
    before: str
    after: str


class Left(NamedTuple):
    name: str
    code: str
    line: int
    reason: str


def _pair(name, *lines):
    """Create a `Pair`: lines that start with "-" are in the code before, with "+" in the code after, others in both."""
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
        "- model = Wrapper(n_gradients=2, use_acg=False, inputs=i, outputs=o)",
        "+ import accum",
        "+ model = accum.GradientAccumulateModel(accum_steps=2, use_agc=False, inputs=i, outputs=o, "
        'last_cycle="carry", micro_batch_weight="equal")',
    ),
    _pair(
        "optimizer",
        "- import gradient_accumulator as ga",
        "- optimizer = ga.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)",
        "+ import accum",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)",
    ),
    _pair(
        "optimizer-of-0.3.0",
        "- from gradient_accumulator.GAOptimizerWrapper import GAOptimizerWrapper",
        '- optimizer = GAOptimizerWrapper(tf.keras.optimizers.SGD(0.1), reduction="SUM")',
        "+ import accum",
        '+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), reduction="SUM", accum_steps=4)',
    ),
    _pair(
        "layers",
        "- from gradient_accumulator import AccumBatchNormalization, unitwise_norm",
        "- from gradient_accumulator.utils import replace_batchnorm_layers",
        "- layer = AccumBatchNormalization(2, 0.9, epsilon=1e-4)",
        "- both = lambda model, x: (replace_batchnorm_layers(model, 2), unitwise_norm(x))",
        "+ import accum",
        "+ layer = accum.AccumBatchNormalization(accum_steps=2, momentum=0.9, epsilon=1e-4)",
        "+ both = lambda model, x: (accum.replace_batchnorm_layers(model, 2), accum.unitwise_norm(x))",
    ),
    _pair(
        "h2g-net",
        "- from utils.accum_optimizers import AccumOptimizer",
        "- optimizer = AccumOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), steps_per_update=2)",
        "+ import accum.compat.v1",
        "+ optimizer = accum.compat.v1.AccumOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), accum_steps=2)",
    ),
    _pair(
        "h2g-net-adam",
        "- from .accum_optimizers import AdamAccumulated",
        "- optimizer = AdamAccumulated(2, 0.1, epsilon=0.05)",
        "+ import accum",
        "+ import tensorflow as tf",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(learning_rate=0.1, "
        "epsilon=2 * 0.05), accum_steps=2)",
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
        "- wrapped = runai.ga.keras.optimizers.Optimizer(tf.keras.optimizers.SGD(0.1), 2)",
        "- optimizer = runai.ga.keras.optimizers.SGD(lr=0.1, steps=2)",
        "+ import accum",
        "+ wrapped = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), 2)",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(learning_rate=0.1), accum_steps=2)",
    ),
    _pair(
        "tensorpack",
        "- from tensorpack.tfutils.optimizer import AccumGradOptimizer",
        "- optimizer = AccumGradOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), niter=2)",
        "+ import accum.compat.v1",
        "+ optimizer = accum.compat.v1.AccumOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "
        'accum_steps=2, reduction="sum", count_micro_steps=True)',
    ),
    _pair(
        "cyberzhg",
        "- from keras_gradient_accumulation import GradientAccumulation",
        "- optimizer = GradientAccumulation(tf.keras.optimizers.SGD(0.1), accumulation_steps=2, momentum_names=[])",
        "+ import accum",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)",
    ),
    _pair(
        "cyberzhg-adam",
        "  import tensorflow as tf",
        "- import keras_gradient_accumulation as kga",
        "- optimizer = kga.AdamAccumulated(2, 0.1, epsilon=0.05)",
        "- plain = kga.AdamAccumulated(2, 0.1, epsilon=None)",
        "+ import accum",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(learning_rate=0.1, "
        "epsilon=2 * 0.05), accum_steps=2)",
        "+ plain = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(learning_rate=0.1, epsilon=2 * "
        "1e-7), accum_steps=2)",
    ),
    _pair(
        "bojone",
        "- from utils.accum_optimizer import AccumOptimizer",
        "- optimizer = AccumOptimizer(tf.keras.optimizers.SGD(0.1), steps_per_update=2)",
        "+ import accum",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)",
    ),
    _pair(
        "bojone-graph",
        "- from accum_optimizer import AccumOptimizer",
        "+ import accum.compat.v1",
        "  tf.compat.v1.disable_eager_execution()",
        "- optimizer = AccumOptimizer(adam, 10)",
        "+ optimizer = accum.compat.v1.AccumOptimizer(adam, 10)",
    ),
    _pair(
        "adam-accumulate",
        "  import tensorflow as tf",
        "- from adam_accumulate import AdamAccumulate",
        "- optimizer = AdamAccumulate(0.1, 0.8, epsilon=0.05, decay=0., accum_iters=2)",
        "- plain = AdamAccumulate(lr=0.1, epsilon=None, accum_iters=2)",
        "+ import accum",
        "+ optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(learning_rate=0.1, "
        "beta_1=0.8, epsilon=0.05), accum_steps=2)",
        "+ plain = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(learning_rate=0.1), accum_steps=2)",
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
        "keras-3-numbers-that-only-running-tells",
        "  import os",
        "  from keras.optimizers import SGD",
        "+ import accum",
        "  parser.add_argument('--accum-steps', type=int, default=4)",
        "  parser.add_argument('--k', type=int, required=True)",
        "  options = {'momentum': 0.9}",
        "- first = lambda args: SGD(0.1, gradient_accumulation_steps=args.accum_steps)",
        "- second = lambda k: SGD(0.1, gradient_accumulation_steps=k)",
        "- third = lambda: SGD(0.1, gradient_accumulation_steps=int(os.environ.get('K', 4)) // 2)",
        "- many = [SGD(0.1, gradient_accumulation_steps=max(2, k)) for k in (2, 4)]",
        "+ first = lambda args: accum.GradientAccumulateOptimizer(SGD(0.1), accum_steps=args.accum_steps)",
        "+ second = lambda k: accum.GradientAccumulateOptimizer(SGD(0.1), accum_steps=k)",
        "+ third = lambda: accum.GradientAccumulateOptimizer(SGD(0.1), accum_steps=int(os.environ.get('K', 4)) // 2)",
        "+ many = [accum.GradientAccumulateOptimizer(SGD(0.1), accum_steps=max(2, k)) for k in (2, 4)]",
        "  make = lambda gradient_accumulation_steps: 0",
        "  fifth = lambda: make(gradient_accumulation_steps=4)",
        "  fourth = lambda rate: SGD(rate, **options)",
    ),
    _pair(
        "keras-3-in-a-function-that-spells-it-out",
        "  from keras.optimizers import SGD",
        "+ import accum",
        "  def make(gradient_accumulation_steps):",
        "-     return SGD(0.1, gradient_accumulation_steps=gradient_accumulation_steps)",
        "+     return accum.GradientAccumulateOptimizer(SGD(0.1), accum_steps=gradient_accumulation_steps)",
        "  optimizer = make(gradient_accumulation_steps=4)",
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
        '+ make = lambda: accum.compat.v1.AccumOptimizer(optimizer, 4, reduction="sum", '
        "count_micro_steps=True), apply_grad_processors",
    ),
    _pair(
        "imported-already",
        "  import accum",
        "  # of the other one",
        "- from gradient_accumulator import GradientAccumulateOptimizer  # K micro-batches",
        "+ # K micro-batches",
        "  make = lambda: None",
        "- optimizer = GradientAccumulateOptimizer(o, 4)",
        "+ optimizer = accum.GradientAccumulateOptimizer(o, 4)",
    ),
    _pair(
        "imported-once-in-each-block",
        "  def one():",
        "-     from gradient_accumulator import GradientAccumulateOptimizer",
        "-     from gradient_accumulator import AccumBatchNormalization",
        "-     return GradientAccumulateOptimizer(o, 4), AccumBatchNormalization(4)",
        "+     import accum",
        "+     return accum.GradientAccumulateOptimizer(o, 4), accum.AccumBatchNormalization(accum_steps=4)",
        "  def other():",
        "-     from tensorpack.tfutils.optimizer import AccumGradOptimizer",
        "-     from gradient_accumulator import GradientAccumulateOptimizer  # both",
        "-     o = GradientAccumulateOptimizer(o, 4)",
        "-     return AccumGradOptimizer(o, 4)",
        "+     import accum.compat.v1",
        "+     # both",
        "+     o = accum.GradientAccumulateOptimizer(o, 4)",
        '+     return accum.compat.v1.AccumOptimizer(o, 4, reduction="sum", count_micro_steps=True)',
    ),
    _pair(
        "nested",
        "- from gradient_accumulator import AccumBatchNormalization as BN, GradientAccumulateModel",
        "- model = GradientAccumulateModel(2, inputs=i, outputs=BN(2)(i))",
        "+ import accum",
        "+ model = accum.GradientAccumulateModel(2, inputs=i, "
        'outputs=accum.AccumBatchNormalization(accum_steps=2)(i), last_cycle="carry", '
        'micro_batch_weight="equal")',
    ),
]

GA = "from gradient_accumulator import GradientAccumulateOptimizer as O, GradientAccumulateModel as M\n"
H2G = "from accum_optimizers import AccumOptimizer, AdamAccumulated\n"
RUNAI = "from runai.ga.keras import optimizers\n"
KERAS = "from keras import optimizers\n"
TENSORPACK = "from tensorpack.tfutils.optimizer import AccumGradOptimizer\n"
HOROVOD = "import horovod.tensorflow.keras as h\n"
CYBERZHG = "from keras_gradient_accumulation import AdamAccumulated, GradientAccumulation\n"
BOJONE = "from accum_optimizer import AccumOptimizer\n"
ADAM = "from adam_accumulate import AdamAccumulate\n"
OF_KERAS = "this file imports `keras`, which before TensorFlow 2.6 is another package than `tf.keras`"
STYLEGAN2 = "import dnnlib.tflib as tflib\n"

UNTOUCHED = [
    "import config\nconfig.Model(minibatch_multiplier=4)\n",
    "from dnnlib import tflib\no = tflib.Optimizer(minibatch_multiplier=None), tflib.Optimizer(learning_rate=0.1)\n",
    "import dnnlib\nimport torch\n# minibatch_multiplier\ndnnlib.util.construct(**options)\n",
    "from optax import GradientAccumulateOptimizer  # gradient_accumulator\nGradientAccumulateOptimizer(1)\n",
    "from transformers import TrainingArguments\nTrainingArguments(gradient_accumulation_steps=4)\n",
    "from keras.optimizers import Adam\nassert isinstance(gradient_accumulation_steps, int) and Adam(rate)\n",
    "class AccumGradOptimizer: pass\nAccumGradOptimizer(1, niter=4)\n",
    "import horovod.tensorflow as hvd\nhvd.DistributedOptimizer(o, backward_passes_per_step=1)\n",
    "def f(runai):\n    return runai.ga.keras.optimizers.Adam(steps=4)\n",
    "import tensorflow as tf\nimport wandb\nwandb.init(config=dict(gradient_accumulation_steps=4))\n",
    'import torch\noptions = {"gradient_accumulation_steps": 4}\nTrainer(gradient_accumulation_steps=4)\n',
    "import keras\nself.gradient_accumulation_steps = config['gradient_accumulation_steps']\n",
    "import keras\nprint(self.args.gradient_accumulation_steps, config.optimizer.gradient_accumulation_steps)\n",
    "import keras\nopt = parser.parse_args()\nprint(opt.gradient_accumulation_steps)\n",
    "from keras.optimizers import Adam\nAdam(**options)  # as in runai\n",
    HOROVOD + "h.DistributedOptimizer(o, **options)  # as AccumOptimizer\n",
    "import horovod.torch as hvd\nhvd.DistributedOptimizer(o, backward_passes_per_step=4)\n",
    "import horovod\nimport horovod.spark.torch as s\nimport torch\ns.TorchEstimator(backward_passes_per_step=4)\n",
    "import horovod.spark.torch\ndef f():\n    import horovod.torch as hvd\n    a['backward_passes_per_step'] = k\n",
    "import runai.ga.torch.optim\nrunai.ga.torch.optim.Adam(4)\n",
    "import tensorpack\nassert AccumGradOptimizer and tensorpack.SimpleTrainer()\n",
    "from accum.compat.v1 import AccumOptimizer, AdamAccumulated\nAdamAccumulated(4)\n",
    "import gradient_accumulator\nx.GradientAccumulateModel(GradientAccumulateModel=4)\n",
]

LEFT = [
    Left("unpacked", GA + "O(**options)\n", 2, "what `*` and `**` unpack"),
    Left("sum-or-mean", GA + 'O("sgd", 4, reduction="SUM")\n', 2, "0.5 always takes the mean"),
    Left("default-of-k", GA + 'O("sgd")\n', 2, "4 by default in 0.3.1"),
    Left("clipping", GA + 'O("sgd", 4, clipnorm=1.0)\n', 2, "`clipnorm` is not an argument of accum's optimizer"),
    Left("adaptive-clipping", GA + "M(4, use_agc=True, inputs=i, outputs=o)\n", 2, "clips the accumulated gradient"),
    Left(
        "unknown",
        "from gradient_accumulator.GAModelWrapperV2 import GAModelWrapperV2\nGAModelWrapperV2(4)\n",
        2,
        "there is no rule",
    ),
    Left("method", GA + "M.from_config(config)\n", 2, "`M.from_config`: there is no rule for it"),
    Left("dynamic", RUNAI + "getattr(optimizers, name)(steps=4)\n", 2, "`optimizers`: it is not called here"),
    Left("subclass", GA + "class Mine(M): pass\n", 2, "`M`: it is not called here"),
    Left("many", GA + "M(1, 2, 3, 4, 5, 6, inputs=i)\n", 2, "up to 5 positional arguments"),
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
    Left("f-string", GA + "x = f'{M(4, inputs=i, outputs=o)}'\n", 2, "it is in an f-string"),
    Left("taken", GA + "O('sgd', 4)\ndef f(accum): pass\n", 2, "uses the name `accum` for something else"),
    Left(
        "one-line",
        "if x: from gradient_accumulator import GAModelWrapper\nGAModelWrapper(4, a=b)\n",
        2,
        "shares a line",
    ),
    Left("decay", H2G + "AdamAccumulated(4, decay=0.1)\n", 2, "`decay` acts on each micro-batch"),
    Left(
        "global",
        "def f():\n    global M\n    from gradient_accumulator import GradientAccumulateModel as M\nM(4, inputs=i)\n",
        4,
        "used outside",
    ),
    Left("none", H2G + "AdamAccumulated(None)\n", 2, "not a plain number or name"),
    Left("expression", H2G + "AdamAccumulated(next(k))\n", 2, "not a plain number or name"),
    Left("rate", H2G + "AdamAccumulated(4, rate())\n", 2, "a schedule counts micro-batches"),
    Left(
        "inner-clipping",
        H2G + "AccumOptimizer(o, 4, clipnorm=1.0)\n",
        2,
        "`clipnorm` is not passed to the inner optimizer",
    ),
    Left("runai-clipping", RUNAI + "optimizers.Adam(4, clipvalue=1.0)\n", 2, "`clipvalue` clips each micro-batch"),
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
        "comment",
        KERAS + "optimizers.SGD(\n    0.1,  # a\n    gradient_accumulation_steps=4)\n",
        2,
        "the comment on",
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
    Left("alias", GA + "Opt = O\nOpt('sgd', 4)\n", 2, "`O`: it is not called here"),
    Left("partial", GA + "functools.partial(O, accum_steps=4)\n", 2, "`O`: it is not called here"),
    Left("unpacked-model", GA + "M(**options)\n", 2, "what `*` and `**` unpack"),
    Left(
        "for-others", "from gradient_accumulator import GradientAccumulateModel\n", 1, "files may import it from here"
    ),
    Left("from-others", "from .nets import GradientAccumulateModel\nGradientAccumulateModel(4)\n", 2, "module of your"),
    Left("by-text", 'import_module("gradient_accumulator").GAModelWrapper(4)\n', 1, "Use an import statement"),
    Left("h2g-net-alias", H2G + "A = AccumOptimizer\nA(o, 4)\n", 2, "`AccumOptimizer`: it is not called here"),
    Left("h2g-net-partial", H2G + "partial(AdamAccumulated, 4)\n", 2, "`AdamAccumulated`: it is not called here"),
    Left("h2g-net-unpacked", H2G + "AdamAccumulated(4, **options)\n", 2, "what `*` and `**` unpack"),
    Left(
        "h2g-net-getattr",
        "from utils import accum_optimizers as h\ngetattr(h, 'AccumOptimizer')(o, 4)\n",
        2,
        "`h`: it is not called here",
    ),
    Left("h2g-net-copied", "from .optim import AdamAccumulated\nAdamAccumulated(4)\n", 2, "a module of your own"),
    Left("cyberzhg-clipping", CYBERZHG + "GradientAccumulation('sgd', 4, clipnorm=1.0)\n", 2, "`clipnorm` clips each"),
    Left("cyberzhg-steps", CYBERZHG + "GradientAccumulation('sgd')\n", 2, "`accumulation_steps`"),
    Left("cyberzhg-decay", CYBERZHG + "AdamAccumulated(4, decay=0.1)\n", 2, "`decay` acts on each micro-batch"),
    Left("cyberzhg-alias", CYBERZHG + "A = AdamAccumulated\n", 2, "it is not called here"),
    Left("cyberzhg-star", "from keras_gradient_accumulation import *\nGradientAccumulation('sgd', 4)\n", 2, "by name"),
    Left("bojone-clipping", BOJONE + "AccumOptimizer(o, 4, clipvalue=1.0)\n", 2, "`clipvalue` clips each micro-batch"),
    Left("bojone-unpacked", BOJONE + "AccumOptimizer(o, **options)\n", 2, "what `*` and `**` unpack"),
    Left("adam-accumulate-steps", ADAM + "AdamAccumulate(lr=0.1)\n", 2, "2 in some copies"),
    Left("adam-accumulate-decay", ADAM + "AdamAccumulate(decay=0.1, accum_iters=4)\n", 2, "use a schedule"),
    Left("adam-accumulate-other", ADAM + "AdamAccumulate(wd=0.1, accum_iters=4)\n", 2, "its argument `wd`"),
    Left(
        "adam-accumulate-copied",
        "from .optim import AdamAccumulate\nAdamAccumulate(accum_iters=4)\n",
        2,
        "a module of your own",
    ),
    Left("stylegan2", STYLEGAN2 + "tflib.Optimizer(minibatch_multiplier=k)\n", 2, "`register_gradients` and"),
    Left(
        "stylegan2-unpacked", STYLEGAN2 + "# minibatch_multiplier\ntflib.Optimizer(**options)\n", 3, "`apply_updates`"
    ),
    Left("stylegan2-dict", STYLEGAN2 + "options['minibatch_multiplier'] = k\n", 2, "StyleGAN2"),
    Left("runai-alias", "import runai.ga\nga = runai.ga\nga.keras.optimizers.Adam(4)\n", 2, "`runai.ga`: it is not"),
    Left("runai-partial", RUNAI + "partial(optimizers.Adam, steps=4)\n", 2, "`optimizers.Adam`: it is not called here"),
    Left("runai-unpacked", RUNAI + "optimizers.Adam(**options)\n", 2, "what `*` and `**` unpack"),
    Left("runai-elastic", "import runai.elastic.keras.models as m\nm.Model(net)\n", 2, "`m.Model`: there is no rule"),
    Left("runai-of-keras", "import keras\n" + RUNAI + "optimizers.Optimizer(keras.optimizers.SGD(), 4)\n", 3, OF_KERAS),
    Left("runai-sgd-of-keras", "from keras import layers\n" + RUNAI + "optimizers.SGD(4)\n", 3, OF_KERAS),
    Left("bojone-of-keras", "from keras.optimizers import *\n" + BOJONE + "AccumOptimizer(Adam(), 4)\n", 3, OF_KERAS),
    Left("cyberzhg-of-keras", CYBERZHG + "import keras.layers as k\nAdamAccumulated(4)\n", 3, OF_KERAS),
    Left("cyberzhg-wrapper-of-keras", CYBERZHG + "import keras\nGradientAccumulation('sgd', 4)\n", 3, OF_KERAS),
    Left("adam-accumulate-of-keras", ADAM + "import numpy, keras\nAdamAccumulate(accum_iters=4)\n", 3, OF_KERAS),
    Left("h2g-net-of-keras", H2G + "import keras\nAccumOptimizer(keras.optimizers.Adam(), 4)\n", 3, OF_KERAS),
    Left(
        "tensorpack-one-call-per-gpu",
        TENSORPACK + "AccumGradOptimizer(o, 4)\ntrain(SyncMultiGPUTrainerReplicated(8))\n",
        2,
        "`SyncMultiGPUTrainerReplicated`",
    ),
    Left("tensorpack-alias", TENSORPACK + "A = AccumGradOptimizer\nA(o, 4)\n", 2, "it is not called here"),
    Left("tensorpack-partial", TENSORPACK + "partial(AccumGradOptimizer, niter=4)\n", 2, "it is not called here"),
    Left("tensorpack-unpacked", TENSORPACK + "AccumGradOptimizer(o, **options)\n", 2, "what `*` and `**` unpack"),
    Left(
        "tensorpack-getattr",
        "import tensorpack\ngetattr(tensorpack.tfutils.optimizer, 'AccumGradOptimizer')(o, 4)\n",
        2,
        "`tensorpack.tfutils.optimizer`: it is not called here",
    ),
    Left("horovod-alias", HOROVOD + "D = h.DistributedOptimizer\nD(o, backward_passes_per_step=4)\n", 3, "`D`: "),
    Left(
        "horovod-partial", HOROVOD + "partial(h.DistributedOptimizer, backward_passes_per_step=4)\n", 2, "`partial`: "
    ),
    Left("horovod-unpacked", HOROVOD + 'h.DistributedOptimizer(o, **{"backward_passes_per_step": 4})\n', 2, "`**`"),
    Left(
        "horovod-getattr",
        HOROVOD + "getattr(h, 'DistributedOptimizer')(o, backward_passes_per_step=4)\n",
        2,
        "`backward_passes_per_step` is passed to something unknown",
    ),
    Left(
        "horovod-adasum",
        HOROVOD + "h.DistributedAdasumOptimizer(o, backward_passes_per_step=4)\n",
        2,
        "is passed to something unknown",
    ),
]


def _keras(name, line, code, reason):
    return Left("keras-3-" + name, KERAS + code.replace("K=", "gradient_accumulation_steps=") + "\n", line, reason)


GOES = "`gradient_accumulation_steps` is passed to something unknown"
READ = "an optimizer of accum has `accum_steps` instead"
APART = "`gradient_accumulation_steps`: it is set outside"
NONE = " may be None, which means no accumulation"

LEFT += [
    _keras("alias", 3, "Opt = optimizers.Adam\nOpt(K=4)", "`Opt`: " + GOES),
    _keras("partial", 2, "functools.partial(optimizers.Adam, K=4)", "`functools.partial`: " + GOES),
    _keras("getattr", 2, "getattr(optimizers, name)(K=4)", "`getattr(optimizers, name)`: " + GOES),
    _keras("table", 2, "TABLE['adam'](K=4)", "`TABLE['adam']`: " + GOES),
    _keras("subclass", 4, "class A(optimizers.Adam):\n  def __init__(self):\n    super().__init__(K=4)", GOES),
    _keras("unpacked-dict", 2, 'optimizers.Adam(**{"gradient_accumulation_steps": 4})', "`**` unpacks"),
    _keras("unpacked-call", 2, "optimizers.Adam(**dict(K=4))", "`**` unpacks"),
    _keras("unpacked-name", 3, "K=4\noptimizers.Adam(**options)", "`**` unpacks"),
    _keras("dict", 2, 'options = {"gradient_accumulation_steps": 4}', APART),
    _keras("dict-call", 2, "options = dict(K=4)", "`dict`: " + GOES),
    _keras("dict-item", 3, "o = {}\no['gradient_accumulation_steps'] = 4\noptimizers.Adam(**o)", APART),
    _keras("dict-default", 2, "o.setdefault('gradient_accumulation_steps', 4)", APART),
    _keras("dict-of-pairs", 2, "o = dict([('gradient_accumulation_steps', 4)])", APART),
    _keras("attribute", 2, "optimizer.gradient_accumulation_steps = 4", APART),
    _keras("attribute-of-opt", 2, "self.opt.gradient_accumulation_steps = 4", APART),
    _keras("attribute-of-a-name", 3, "a = optimizers.SGD(0.1)\na.gradient_accumulation_steps = 4", APART),
    _keras("read", 2, "scale = model.optimizer.gradient_accumulation_steps or 1", READ),
    _keras("read-of-opt", 2, "opt.gradient_accumulation_steps *= 2", READ),
    _keras("read-of-a-name", 3, "p.args = optimizers.SGD(0.1)\nprint(p.args.gradient_accumulation_steps)", READ),
    _keras("read-of-a-call", 2, "k = optimizers.SGD(0.1).gradient_accumulation_steps", READ),
    _keras("read-by-text", 2, "k = getattr(optimizer, 'gradient_accumulation_steps', 1)", READ),
    _keras("read-and-logged", 3, "import logging\nlogging.info(optimizer.gradient_accumulation_steps)", READ),
    _keras("dict-of-lists", 2, "o = dict([['gradient_accumulation_steps', 4]])", APART),
    _keras("ordered-dict", 3, "import collections\no = collections.OrderedDict(K=4)", GOES),
    _keras("namespace", 3, "import types\no = types.SimpleNamespace(K=4)", GOES),
    _keras("namespace-of-options", 3, "import argparse\no = argparse.Namespace(K=4)", GOES),
    _keras("name-of-it", 2, "NAME = 'gradient_accumulation_steps'\nOpt(**{NAME: 4})", APART),
    _keras("star", 3, "from keras.optimizers import *\nAdam(K=4)", "`Adam`: " + GOES),
    _keras("conditional", 2, "optimizers.SGD(0.1, K=steps if flag else None)", "`steps if flag else None`" + NONE),
    _keras("conditional-first", 2, "optimizers.SGD(0.1, K=None if one else 4)", "`None if one else 4`" + NONE),
    _keras("or", 2, "optimizers.SGD(0.1, K=steps or None)", "`steps or None`" + NONE),
    _keras("get", 2, "optimizers.SGD(0.1, K=config.get('steps'))", "`config.get('steps')`" + NONE),
    _keras("call", 2, "optimizers.SGD(0.1, K=steps())", "`steps()`" + NONE),
    _keras("parameter", 3, "def f(k=None):\n  optimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("annotation", 3, "def f(k: Optional[int]):\n  optimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("asked", 3, "if k is not None:\n  optimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("assigned", 4, "k = 4\nj = k = None\noptimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("assigned-in-turn", 4, "self.j = d.get(1)\nk = c.j\noptimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("assigned-in-a-tuple", 3, "i, (j, k) = 1, (2, None)\noptimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("loop", 3, "for k in (None, 4):\n  optimizers.SGD(0.1, K=k)", "`k`" + NONE),
    _keras("item", 3, "c = {'k': None}\noptimizers.SGD(0.1, K=c['k'])", "`c['k']`" + NONE),
    _keras("option", 3, "p.add_argument('-k', '--to-k', type=int)\noptimizers.SGD(0.1, K=a.to_k)", "`a.to_k`" + NONE),
    _keras("flag", 3, "DEFINE_integer('k', None, '')\noptimizers.SGD(0.1, K=FLAGS.k)", "`FLAGS.k`" + NONE),
    _keras("or-a-call", 2, "optimizers.SGD(0.1, K=steps[0] or next(x))", NONE),
    _keras("zero", 2, "optimizers.SGD(0.1, K=0)", "`0` is not a number of micro-batches"),
    _keras("float", 2, "optimizers.SGD(0.1, K=4.0)", "`4.0` is not a number of micro-batches"),
    _keras("minus", 2, "optimizers.SGD(0.1, K=-1)", "`-1` is not a number of micro-batches"),
    _keras("by-position", 2, "optimizers.SGD(0.1, 0, 0, 0, 0, 0, 0, True, K=4)", "up to 7 positional arguments"),
]
