"""One small graph for each rule of `accum._rows`: an operation by its type, its inputs, and what is to be said of it.

A length of an axis is a number, or a text: "B" for the number of examples, "2B" for two entries of each example.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from accum import _tf
from accum._rows import Rows

tf1 = tf.compat.v1


class Batch(NamedTuple):
    """An input with an axis of examples."""

    shape: Tuple[Any, ...]
    data: str = "normal"

    @property
    def rows(self) -> Rows:
        (axis,) = [index for index, length in enumerate(self.shape) if isinstance(length, str)]
        return Rows(axis, int(self.shape[axis][:-1] or 1))

    def draw(self, count: int, seed: int) -> Any:
        shape = [length if isinstance(length, int) else self.rows.per_example * count for length in self.shape]
        return DATA[self.data](np.random.RandomState(seed), shape)

    @property
    def dtype(self) -> tf.DType:
        return tf.string if self.data == "text" else tf.as_dtype(self.draw(2, 0).dtype)

    def placeholder(self) -> tf.Tensor:
        return tf1.placeholder(self.dtype, [length if isinstance(length, int) else None for length in self.shape])


class ShapeOf(NamedTuple):
    """The shape of a tensor with an axis of examples, which an operation takes in place of numbers."""

    shape: Tuple[Any, ...]


class Case(NamedTuple):
    """An operation, and what is to be said of it.

    Attributes:
      kind: its type.
      inputs: for each a `Batch`, a `ShapeOf`, a list of them, or an array.
      outputs: for each `Rows` or None.
      how: the combination, or "random".
      attributes: of the operation, beside dtypes of its inputs.
    """

    kind: str
    inputs: Sequence[Any]
    outputs: Sequence[Optional[Tuple[int, int]]] = ((0, 1),)
    how: str = ""
    attributes: Dict[str, Any] = {}

    def __str__(self) -> str:
        inputs = [_text_of(part) for one in self.inputs for part in (one if isinstance(one, list) else [one])]
        return f"{self.kind}-{'-'.join(map(str, inputs))}".replace(" ", "").replace("'", "")


def _text_of(one: Any) -> str:
    return str(getattr(one, "shape", one))


def _definite(random: Any, shape: Any) -> Any:
    factor = random.randn(*shape)
    return (factor @ np.swapaxes(factor, -1, -2) + 3 * np.eye(shape[-1])).astype(np.float32)


DATA = {
    "normal": lambda random, shape: random.randn(*shape).astype(np.float32),
    "double": lambda random, shape: random.randn(*shape),
    "positive": lambda random, shape: random.uniform(0.5, 3.0, shape).astype(np.float32),
    "unit": lambda random, shape: random.uniform(0.05, 0.95, shape).astype(np.float32),
    "int": lambda random, shape: random.randint(0, 4, shape).astype(np.int32),
    "byte": lambda random, shape: random.randint(1, 5, shape).astype(np.int32),
    "bool": lambda random, shape: random.rand(*shape) > 0.5,
    "complex": lambda random, shape: (random.randn(*shape) + 1j * random.randn(*shape)).astype(np.complex64),
    "text": lambda random, shape: np.array(random.randint(0, 99, shape).astype(str), object),
    "definite": _definite,
}


def type_attributes(graph: tf.Graph, kind: str, tensors: Sequence[Any]) -> Dict[str, Any]:
    """Return the attributes of an operation that follow from its inputs: tensors, or lists of them."""
    found: Dict[str, Any] = {}
    for argument, tensor in zip(_tf.definitions.definition_of(graph, kind).input_arg, tensors):
        several = tensor if isinstance(tensor, list) else [tensor]
        if argument.type_attr:
            found[argument.type_attr] = several[0].dtype.base_dtype
        if argument.number_attr:
            found[argument.number_attr] = len(several)
        if argument.type_list_attr:
            found[argument.type_list_attr] = [one.dtype.base_dtype for one in several]
    return found


def _set(attribute: Any, value: Any) -> None:
    if isinstance(value, bool):
        attribute.b = value
    elif isinstance(value, (int, np.integer)):
        attribute.i = value
    elif isinstance(value, float):
        attribute.f = value
    elif isinstance(value, str):
        attribute.s = value.encode()
    elif isinstance(value, tf.DType):
        attribute.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attribute.shape.CopyFrom(value.as_proto())
    elif all(isinstance(one, tf.DType) for one in value) and value:
        attribute.list.type.extend(one.as_datatype_enum for one in value)
    elif all(isinstance(one, float) for one in value) and value:
        attribute.list.f.extend(value)
    else:
        attribute.list.SetInParent()
        attribute.list.i.extend(value)


def build(kind: str, tensors: Sequence[Any], attributes: Dict[str, Any]) -> tf.Operation:
    """Add an operation to the current graph, whatever names it has in Python."""
    graph = tf1.get_default_graph()
    part = tf1.GraphDef()
    part.versions.CopyFrom(graph.as_graph_def().versions)
    node = part.node.add(name=kind, op=kind)
    flat = [one for tensor in tensors for one in (tensor if isinstance(tensor, list) else [tensor])]
    node.input.extend(f"input_{index}:0" for index in range(len(flat)))
    for name, value in {**type_attributes(graph, kind, tensors), **attributes}.items():
        _set(node.attr[name], value)
    feeds = {f"input_{index}:0": tensor for index, tensor in enumerate(flat)}
    (op,) = tf.graph_util.import_graph_def(part, input_map=feeds, return_elements=[kind], name="")
    return op


def tensors_of(case: Case) -> Tuple[List[Any], List[Tuple[Batch, tf.Tensor]]]:
    """Return the inputs of a case as tensors of the current graph, and its batch: its inputs with placeholders.

    A case whose inputs only have a shape gets a batch of its own for it.
    """
    batch: List[Tuple[Batch, tf.Tensor]] = []

    def tensor_of(one: Any) -> Any:
        if isinstance(one, list):
            return [tensor_of(part) for part in one]
        if isinstance(one, ShapeOf):
            like = Batch(one.shape)
            batch.append((like, like.placeholder()))
            return tf.shape(batch[-1][1])
        if isinstance(one, Batch):
            batch.append((one, one.placeholder()))
            return batch[-1][1]
        return tf.constant(one)

    return [tensor_of(one) for one in case.inputs], batch


def kinds(text: str) -> List[str]:
    """Return the types of operations that a text lists."""
    return text.split()


def options(**values: Any) -> Dict[str, Any]:
    """Return attributes of operations by their names."""
    return values


F = np.float32
B3 = Batch(("B", 3))
CASES: List[Case] = []


def _case(kind: str, *inputs: Any, to: Any = ((0, 1),), how: str = "", **attributes: Any) -> None:
    outputs = [to] if isinstance(to, tuple) and to and isinstance(to[0], int) else list(to)
    CASES.append(Case(kind, inputs, outputs, how, attributes))


# Elementwise

for _kind in kinds("""
    Abs Acos Acosh Asin Asinh AsString Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1
    BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Ceil Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv
    Exp Expint Expm1 FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin GuaranteeConst Identity IsFinite
    IsInf IsNan LeakyRelu Lgamma Log Log1p Ndtri Neg OnesLike PreventGradient Reciprocal Relu Relu6 Rint
    Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Spence Sqrt Square StopGradient Tan
    Tanh ZerosLike
    """):
    _case(_kind, Batch((3, "2B"), "unit"), to=(1, 2))
for _kind in kinds("Angle ComplexAbs Conj Imag Real"):
    _case(_kind, Batch(("B", 3), "complex"))
for _kind in kinds("StringLength StringLower StringStrip StringUpper StringToNumber"):
    _case(_kind, Batch(("B", 3), "text"))
for _kind in kinds("StringToHashBucket StringToHashBucketFast StringToHashBucketStrong"):
    _more = {"key": [1, 2]} if _kind.endswith("Strong") else {}
    _case(_kind, Batch(("B", 3), "text"), num_buckets=7, **_more)
for _kind in kinds("Invert PopulationCount"):
    _case(_kind, Batch(("B", 3), "int"))
_case("LogicalNot", Batch(("B", 3), "bool"))
_case("Cast", B3, DstT=tf.int32)
_case("CheckNumerics", B3, message="")
_case("CheckNumericsV2", B3, message="")
_case("Bucketize", B3, boundaries=[-0.5, 0.5])
_case("EnsureShape", B3, shape=tf.TensorShape([None, 3]))
_case("Bitcast", B3, type=tf.int32)
_case("Bitcast", Batch((2, "B")), type=tf.uint8, to=(1, 1))

for _kind in kinds("""
    Add AddV2 Atan2 Div DivNoNan Maximum Minimum Mul MulNoNan NextAfter Pow RealDiv SquaredDifference Sub
    Xdivy Xlog1py Xlogy Equal NotEqual Greater GreaterEqual Less LessEqual FloorDiv FloorMod
    """):
    _case(_kind, Batch((2, "B", 3), "positive"), Batch(("B", 1), "positive"), to=(1, 1))
    _case(_kind, np.full([2, 1, 3], 0.7, F), Batch(("B", 1), "positive"), to=(1, 1))
for _kind in kinds("""
    EluGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad TanhGrad FakeQuantWithMinMaxArgsGradient ApproximateEqual Igamma
    IgammaGradA Igammac Polygamma RandomGammaGrad Zeta Complex
    """):
    _case(_kind, Batch(("B", 3), "positive"), Batch(("B", 3), "positive"))
for _kind in kinds("BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift Mod TruncateDiv TruncateMod"):
    _case(_kind, Batch(("B", 3), "byte"), np.array([1, 2, 3], np.int32))
for _kind in kinds("LogicalAnd LogicalOr"):
    _case(_kind, Batch(("B", 3), "bool"), Batch(("B", 1), "bool"))
_case("AddN", [B3, B3])
_case("StaticRegexReplace", Batch(("B", 3), "text"), pattern="[1-4]", rewrite="0")
_case("StaticRegexFullMatch", Batch(("B", 3), "text"), pattern="[1-4]+")
_case("RegexReplace", Batch(("B", 3), "text"), np.array("[1-4]", object), np.array("0", object))
_case("RegexFullMatch", Batch(("B", 3), "text"), np.array("[1-4]+", object))
_case("Substr", Batch(("B", 3), "text"), np.array(0, np.int32), np.array(1, np.int32))
_case("EncodeBase64", Batch(("B", 3), "text"))
_unicode = options(input_encoding="UTF-8", output_encoding="UTF-16-BE")
_case("UnicodeTranscode", Batch(("B", 3), "text"), **_unicode)
_case("StringJoin", [Batch(("B", 3), "text"), Batch(("B", 3), "text")])
_case("Betainc", *[Batch(("B", 3), "unit")] * 3)
_case("ClipByValue", B3, F(-0.5), F(0.5))
_case("SelectV2", Batch(("B", 1), "bool"), B3, np.ones(3, F))
_case("Select", Batch(("B",), "bool"), B3, B3)
_case("Select", Batch(("B", 3), "bool"), B3, B3)
_case("Select", np.array(True), B3, B3)
_case("Select", np.array([True, False]), *[Batch((2, "B"))] * 2, to=(1, 1))
_case("FakeQuantWithMinMaxVars", B3, F(-1), F(1))
_case("FakeQuantWithMinMaxVarsPerChannel", B3, -np.ones(3, F), np.ones(3, F))
_case("FakeQuantWithMinMaxVarsGradient", B3, B3, F(-1), F(1), to=[(0, 1), None, None], how="sum")
_case(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    B3,
    B3,
    -np.ones(3, F),
    np.ones(3, F),
    to=[(0, 1), None, None],
    how="sum",
)

# Numbers of a shape

_S = ShapeOf((2, "B", 3))
for _kind in kinds("RandomUniform RandomStandardNormal TruncatedNormal"):
    _case(_kind, _S, dtype=tf.float32, to=(1, 1), how="random")
_case("RandomUniformInt", _S, np.int32(0), np.int32(9), to=(1, 1), how="random")
_seed = np.array([1, 2], np.int32)
for _kind in kinds("Uniform Normal TruncatedNormal"):
    _name = "StatelessRandom" + _kind if _kind != "TruncatedNormal" else "StatelessTruncatedNormal"
    _case(_name, _S, _seed, dtype=tf.float32, to=(1, 1), how="random")
_case("StatelessRandomUniformInt", _S, _seed, np.int32(0), np.int32(9), to=(1, 1), how="random")
_case("StatelessRandomUniformFullInt", _S, _seed, dtype=tf.int32, to=(1, 1), how="random")
_philox = np.array([1], np.uint64), np.array([2, 3], np.uint64), np.int32(1)
for _kind in kinds("RandomUniform RandomNormal TruncatedNormal"):
    _case(f"Stateless{_kind}V2", _S, *_philox, dtype=tf.float32, to=(1, 1), how="random")
_case("StatelessRandomUniformIntV2", _S, *_philox, np.int32(0), np.int32(9), to=(1, 1), how="random")
_case("StatelessRandomUniformFullIntV2", _S, *_philox, dtype=tf.int32, to=(1, 1), how="random")
_case("Multinomial", B3, np.int32(4), how="random")
_case("StatelessMultinomial", B3, np.int32(4), _seed, how="random")
_case("Fill", _S, F(2), to=(1, 1))
_case("BroadcastTo", np.ones([1, 3], F), _S, to=(1, 1))
_case("BroadcastTo", B3, _S, to=(1, 1))

# Products

_case("MatMul", B3, np.ones([3, 2], F))
_case("MatMul", Batch((3, "B")), np.ones([3, 2], F), transpose_a=True)
_case("MatMul", np.ones([2, 3], F), Batch((3, "B")), to=(1, 1))
_case("MatMul", np.ones([2, 3], F), B3, transpose_b=True, to=(1, 1))
_case("MatMul", B3, Batch(("B", 2)), transpose_a=True, to=[None], how="product")
_case("MatMul", Batch((3, "B")), Batch(("B", 2)), to=[None], how="product")
_case("SparseMatMul", B3, np.ones([3, 2], F))
for _kind in kinds("BatchMatMul BatchMatMulV2"):
    _case(_kind, Batch(("B", 2, 3)), Batch(("B", 3, 2)))
    _case(_kind, Batch((4, "B", 3)), np.ones([4, 3, 2], F), to=(1, 1))
    _case(_kind, Batch((4, "B", 3)), Batch((4, "B", 2)), adj_x=True, to=[None], how="product")
_case("BatchMatMulV2", Batch(("B", 2, 3)), np.ones([3, 4], F))
_case("BatchMatMulV3", Batch(("B", 2, 3)), np.ones([3, 4], F), Tout=tf.float32)
_case("Einsum", [Batch(("B", 2, 3)), Batch(("B", 4, 3))], equation="bij,bkj->bik")
_case("Einsum", [Batch((2, "B", 3)), np.ones([3, 4], F)], equation="...j,jk->...k", to=(1, 1))
_case("Einsum", [Batch(("B", 3)), Batch(("B", 4))], equation="bi,bj->ij", to=[None], how="product")
_case("Einsum", [Batch(("B", 3))], equation="bi->i", to=[None], how="product")

# The last axes

for _kind in kinds("LogSoftmax Softmax MatrixDiag"):
    _case(_kind, Batch((2, "B", 3)), to=(1, 1))
for _kind in kinds("FFT IFFT FFT2D IFFT2D FFT3D IFFT3D"):
    _case(_kind, Batch(("B", 2, 2, 2), "complex"))
_case("RFFT", B3, np.array([3], np.int32))
_case("IRFFT", Batch(("B", 3), "complex"), np.array([4], np.int32))
_case("RFFT2D", Batch(("B", 2, 3)), np.array([2, 3], np.int32))
_case("IRFFT2D", Batch(("B", 2, 3), "complex"), np.array([2, 4], np.int32))
_case("RFFT3D", Batch(("B", 2, 2, 3)), np.array([2, 2, 3], np.int32))
_case("IRFFT3D", Batch(("B", 2, 2, 3), "complex"), np.array([2, 2, 4], np.int32))
_M = Batch((2, "B", 3, 3), "definite")
for _kind in kinds("Cholesky MatrixDeterminant MatrixInverse MatrixSquareRoot"):
    _case(_kind, _M, to=(1, 1))
_case("MatrixLogarithm", Batch(("B", 3, 3), "complex"))
_case("MatrixDiagPart", _M, to=(1, 1))
_case("Eig", Batch(("B", 3, 3), "definite"), Tout=tf.complex64, to=[(0, 1), (0, 1)])
_case("LogMatrixDeterminant", _M, to=[(1, 1), (1, 1)])
_case("Lu", _M, to=[(1, 1), (1, 1)])
_case("Qr", _M, to=[(1, 1), (1, 1)])
_case("SelfAdjointEigV2", _M, to=[(1, 1), (1, 1)])
_case("Svd", _M, to=[(1, 1)] * 3)
for _kind in kinds("CholeskyGrad MatrixSolve MatrixTriangularSolve"):
    _case(_kind, _M, _M, to=(1, 1))
_case("MatrixBandPart", _M, np.int64(1), np.int64(0), to=(1, 1))
_case("MatrixSetDiag", _M, Batch((2, "B", 3)), to=(1, 1))
for _v in kinds("V2 V3"):
    _case("MatrixSetDiag" + _v, _M, Batch((2, "B", 3)), np.int32(0), to=(1, 1))
    _case("MatrixDiagPart" + _v, _M, np.array([-1, 1], np.int32), F(0), to=(1, 1))
    _more = (np.int32(0), np.int32(-1), np.int32(-1), F(0))
    _case("MatrixDiag" + _v, Batch((2, "B", 3)), *_more, to=(1, 1))
    _case("MatrixDiag" + _v, Batch(("B", 2, 3)), np.array([0, 1], np.int32), *_more[1:])
_case("Cross", Batch((2, "B", 3)), Batch((2, "B", 3)), to=(1, 1))
_sparse = np.array([[0, 0], [1, 2]], np.int64), np.ones(2, F), np.array([2, 3], np.int64)
_case("SparseTensorDenseMatMul", *_sparse, Batch((3, "B")), to=(1, 1))
_case("SparseTensorDenseMatMul", *_sparse, B3, adjoint_b=True, to=(1, 1))
_case("TopKV2", Batch((2, "B", 3)), np.int32(2), to=[(1, 1), (1, 1)])
_case("NthElement", Batch((2, "B", 3)), np.int32(1), to=(1, 1))
_case("InTopK", B3, Batch(("B",), "int"), k=1)
_case("InTopKV2", B3, Batch(("B",), "int"), np.int32(1))
_case("SoftmaxCrossEntropyWithLogits", B3, B3, to=[(0, 1), (0, 1)])
_case("SparseSoftmaxCrossEntropyWithLogits", Batch(("B", 4)), Batch(("B",), "int"), to=[(0, 1), (0, 1)])

# Reductions

_T = Batch((2, "B", 3))
for _kind, _how in {"Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "prod"}.items():
    _case(_kind, _T, np.array([0], np.int32), to=(0, 1))
    _case(_kind, _T, np.array([0, 2], np.int32), to=(1, 1), keep_dims=True)
    _case(_kind, _T, np.array([1, -1], np.int32), to=[None], how=_how)
_case("EuclideanNorm", _T, np.array([0], np.int32), to=(0, 1))
_case("EuclideanNorm", _T, np.array([1], np.int32), to=[None], how="euclidean_norm")
for _kind in ("All", "Any"):
    _case(_kind, Batch((2, "B"), "bool"), np.array(0, np.int32), to=(0, 1))
    _case(_kind, Batch((2, "B"), "bool"), np.array(1, np.int32), to=[None], how=_kind.lower())
_case("L2Loss", _T, to=[None], how="sum")
_case("BiasAdd", _T, np.arange(3, dtype=F), to=(1, 1))
_case("BiasAdd", Batch(("B", 2, 3, 3)), np.arange(2, dtype=F), data_format="NCHW")
_case("BiasAddV1", _T, np.arange(3, dtype=F), to=(1, 1))
_case("BiasAddGrad", _T, to=[None], how="sum")
for _kind in kinds("ArgMax ArgMin"):
    _case(_kind, _T, np.int32(0), to=(0, 1))
for _kind in kinds("Cumsum Cumprod CumulativeLogsumexp"):
    _case(_kind, _T, np.int32(2), to=(1, 1))
for _kind in kinds("Sum Max Min Prod"):
    _more = options(how=f"segment_{_kind.lower()}")
    _case(f"UnsortedSegment{_kind}", B3, Batch(("B",), "int"), np.int32(5), to=[None], **_more)
    _case(f"UnsortedSegment{_kind}", Batch((3, "B")), np.array([0, 1, 0], np.int32), np.int32(2), to=(1, 1))
_case("Bincount", Batch(("B", 3), "int"), np.int32(5), np.zeros(0, F), to=[None], how="bincount")
_case("DenseBincount", Batch(("B", 3), "int"), np.int32(5), np.zeros(0, F))
_case("DenseBincount", Batch(("B",), "int"), np.int32(5), np.zeros(0, F), to=[None], how="bincount")
_case("DenseBincount", Batch(("B",), "int"), np.int32(5), np.zeros(0, F), to=[None], how="any", binary_output=True)
_case("ScatterNd", Batch(("B", 1), "int"), B3, np.array([4, 3], np.int32), to=[None], how="sum")

# By entry of the first axis

_IMAGE = Batch(("2B", 6, 6, 2))
_POOLED = Batch(("2B", 3, 3, 2))
_two = options(ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID")
_conv = options(strides=[1, 1, 1, 1], padding="SAME")
_F2 = np.random.RandomState(0).randn(3, 3, 2, 2).astype(F)
_to = (0, 2)
_case("Conv2D", _IMAGE, _F2, to=_to, **_conv)
_case("Conv2D", _IMAGE, _F2, to=_to, dilations=[1, 2, 2, 1], **_conv)
_case("Conv2DBackpropInput", ShapeOf(("2B", 6, 6, 2)), _F2, _IMAGE, to=_to, **_conv)
_case("Conv2DBackpropFilter", _IMAGE, np.array([3, 3, 2, 2], np.int32), _IMAGE, to=[None], how="product", **_conv)
_case("DepthwiseConv2dNative", _IMAGE, _F2[..., :1], to=_to, **_conv)
_case("DepthwiseConv2dNativeBackpropInput", ShapeOf(("2B", 6, 6, 2)), _F2[..., :1], _IMAGE, to=_to, **_conv)
_case(
    "DepthwiseConv2dNativeBackpropFilter",
    _IMAGE,
    np.array([3, 3, 2, 1], np.int32),
    _IMAGE,
    to=[None],
    how="product",
    **_conv,
)
_SOLID = Batch(("B", 4, 4, 4, 2))
_F3 = np.random.RandomState(0).randn(3, 3, 3, 2, 2).astype(F)
_conv3 = options(strides=[1] * 5, padding="SAME")
_case("Conv3D", _SOLID, _F3, **_conv3)
_case("Conv3DBackpropInputV2", ShapeOf(("B", 4, 4, 4, 2)), _F3, _SOLID, **_conv3)
_shape = np.array([3, 3, 3, 2, 2], np.int32)
_case("Conv3DBackpropFilterV2", _SOLID, _shape, _SOLID, to=[None], how="product", **_conv3)
_dilation = options(strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="SAME")
_case("Dilation2D", _IMAGE, _F2[..., 0], to=_to, **_dilation)
_case("Dilation2DBackpropInput", _IMAGE, _F2[..., 0], _IMAGE, to=_to, **_dilation)
_case("Dilation2DBackpropFilter", _IMAGE, _F2[..., 0], _IMAGE, to=[None], how="product", **_dilation)
for _kind in kinds("AvgPool MaxPool"):
    _case(_kind, _IMAGE, to=_to, **_two)
    _case(_kind + "3D", _SOLID, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
_case("AvgPoolGrad", ShapeOf(("2B", 6, 6, 2)), _POOLED, to=_to, **_two)
_three = options(ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
_HALF = Batch(("B", 2, 2, 2, 2))
_case("AvgPool3DGrad", ShapeOf(("B", 4, 4, 4, 2)), _HALF, **_three)
_case("MaxPoolGrad", _IMAGE, _POOLED, _POOLED, to=_to, **_two)
_case("MaxPoolGradGrad", _IMAGE, _POOLED, _IMAGE, to=_to, **_two)
_case("MaxPool3DGrad", _SOLID, _HALF, _HALF, **_three)
_case("MaxPool3DGradGrad", _SOLID, _HALF, _SOLID, **_three)
_sizes = np.array([1, 2, 2, 1], np.int32)
_case("MaxPoolV2", _IMAGE, _sizes, _sizes, padding="VALID", to=_to)
_case("MaxPoolGradV2", _IMAGE, _POOLED, _POOLED, _sizes, _sizes, padding="VALID", to=_to)
_case("MaxPoolGradGradV2", _IMAGE, _POOLED, _IMAGE, _sizes, _sizes, padding="VALID", to=_to)
_case("MaxPoolWithArgmax", _IMAGE, to=[_to, _to], **_two)
_case("MaxPoolGradWithArgmax", _IMAGE, _POOLED, Batch(("2B", 3, 3, 2), "place"), to=_to, **_two)
DATA["place"] = lambda random, shape: random.randint(0, 18, shape).astype(np.int64)
_case("LRN", _IMAGE, to=_to)
_case("LRNGrad", _IMAGE, _IMAGE, _IMAGE, to=_to)
_case("DepthToSpace", Batch(("B", 2, 2, 4)), block_size=2)
_case("SpaceToDepth", _IMAGE, block_size=2, to=_to)
_patches = options(ksizes=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID")
_case("ExtractImagePatches", _IMAGE, rates=[1, 1, 1, 1], to=_to, **_patches)
_case("ExtractVolumePatches", _SOLID, ksizes=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
_glimpse = options(uniform_noise=False, noise="zero", to=_to)
_case("ExtractGlimpse", _IMAGE, np.array([2, 2], np.int32), Batch(("2B", 2), "unit"), **_glimpse)
_case("ExtractGlimpseV2", _IMAGE, np.array([2, 2], np.int32), Batch(("2B", 2), "unit"), **_glimpse)
_BOXES = Batch(("B", 2, 4), "unit")
_case("DrawBoundingBoxes", Batch(("B", 6, 6, 3)), _BOXES)
_case("DrawBoundingBoxesV2", Batch(("B", 6, 6, 3)), _BOXES, np.ones([1, 3], F))
_size = np.array([4, 5], np.int32)
for _kind in kinds("Area Bicubic Bilinear NearestNeighbor"):
    _case(f"Resize{_kind}", _IMAGE, _size, to=_to)
_case("ResizeBilinearGrad", Batch(("B", 4, 5, 2)), Batch(("B", 6, 6, 2)))
_case("ResizeBicubicGrad", Batch(("B", 4, 5, 2)), Batch(("B", 6, 6, 2)))
_case("ResizeNearestNeighborGrad", Batch(("B", 4, 5, 2)), np.array([6, 6], np.int32))
_scale = np.ones(2, F), np.zeros(2, F)
_case("ScaleAndTranslate", _IMAGE, _size, *_scale, to=_to)
_case("ScaleAndTranslateGrad", Batch(("B", 4, 5, 2)), Batch(("B", 6, 6, 2)), *_scale)
_turns = options(interpolation="BILINEAR")
for _turn in (Batch(("2B", 8), "unit"), np.ones([1, 8], F) / 8):
    _case("ImageProjectiveTransformV2", _IMAGE, _turn, _size, to=_to, **_turns)
    _case("ImageProjectiveTransformV3", _IMAGE, _turn, _size, F(0), to=_to, **_turns)
_W = np.random.RandomState(1).randn(5, 8).astype(F)
_state = Batch(("B", 2))
_case("LSTMBlockCell", B3, _state, _state, _W, *[np.ones(2, F)] * 3, np.ones(8, F), to=[(0, 1)] * 7)
_case("GRUBlockCell", B3, _state, _W[:, :4], _W[:, 4:6], np.ones(4, F), np.ones(2, F), to=[(0, 1)] * 4)
_sequence = Batch((4, "B", 3))
_states = Batch((4, "B", 2))
_weights = (_W, *[np.ones(2, F)] * 3, np.ones(8, F))
_of_lstm = (np.int64(4), _sequence, _state, _state, *_weights)
for _v in ("", "V2"):
    _case("BlockLSTM" + _v, *_of_lstm, to=[(1, 1)] * 7)
    _grads = [(1, 1), (0, 1), (0, 1)] + [None] * 5
    _case("BlockLSTMGrad" + _v, *_of_lstm, *[_states] * 9, to=_grads, how="product", use_peephole=False)
_case("AdjustContrastv2", Batch((2, "B", 3, 3, 3)), F(0.5), to=(1, 1))
for _kind in kinds("Hue Saturation"):
    _case(f"Adjust{_kind}", Batch((2, "B", 3), "unit"), F(0.5), to=(1, 1))
for _kind in kinds("HSVToRGB RGBToHSV"):
    _case(_kind, Batch((2, "B", 3), "unit"), to=(1, 1))
_case("SpaceToBatchND", Batch(("B", 4, 4, 2)), np.array([2, 2], np.int32), np.zeros([2, 2], np.int32), to=[None])
_case("SpaceToBatch", Batch(("B", 4, 4, 2)), np.zeros([2, 2], np.int32), block_size=2, to=[None])
_ones = [np.ones(2, F)] * 4
_nothing = [np.ones(2, F)] * 2 + [np.zeros(0, F)] * 2
for _v in ("", "V2", "V3"):
    _types = options(U=tf.float32) if _v else {}
    _count = 6 if _v == "V3" else 5
    _rest = [None] * (_count - 1)
    _case("FusedBatchNorm" + _v, _IMAGE, *_ones, is_training=False, to=[_to] + _rest)
    _case("FusedBatchNorm" + _v, _IMAGE, *_nothing, is_training=True, to=[_to] + _rest, how="moments")
    _reserved = [np.ones(2, F)] * 3 + ([np.zeros(0, F)] if _v == "V3" else [])
    _inputs = (_IMAGE, _IMAGE, *_reserved)
    _sums = [_to, None, None, None, None]
    _case("FusedBatchNormGrad" + _v, *_inputs, is_training=False, to=_sums, how="sum")
    _case("FusedBatchNormGrad" + _v, *_inputs, is_training=True, to=_sums, how="moments")

# Axes

_case("Reshape", Batch(("B", 6)), np.array([-1, 2, 3], np.int32))
_case("Reshape", Batch(("B", 6)), np.array([-1, 3], np.int32), to=(0, 2))
_case("Reshape", Batch(("2B", 3)), np.array([-1, 6], np.int32))
_case("Reshape", Batch((2, "B", 6)), np.array([2, -1, 2, 3], np.int32), to=(1, 1))
_case("Reshape", Batch((2, 3, "B", 4)), np.array([6, -1], np.int32), to=(1, 4))
_case("Reshape", Batch(("B", 6)), ShapeOf(("B", 2, 3)))
for _kind in kinds("Transpose ConjugateTranspose"):
    _case(_kind, _T, np.array([1, 2, 0], np.int32), to=(0, 1))
_case("ExpandDims", _T, np.int32(0), to=(2, 1))
_case("ExpandDims", _T, np.int32(-1), to=(1, 1))
_case("Squeeze", Batch((1, "B", 1)), squeeze_dims=[0], to=(0, 1))
_case("Squeeze", Batch((1, "B", 1)), squeeze_dims=[-1], to=(1, 1))
_case("ConcatV2", [_T, Batch((2, "B", 1))], np.int32(-1), to=(1, 1))
_case("ConcatV2", [B3, B3], np.int32(0), to=[None])
_case("Concat", np.int32(2), [_T, Batch((2, "B", 1))], to=(1, 1))
_case("Pack", [B3, B3], axis=0, to=(1, 1))
_case("Pack", [B3, B3], axis=-1)
_case("Unpack", _T, num=2, axis=0, to=[(0, 1)] * 2)
_case("Split", np.int32(0), _T, num_split=2, to=[(1, 1)] * 2)
_case("SplitV", B3, np.array([1, 2], np.int32), np.int32(1), num_split=2, to=[(0, 1)] * 2)
_case("Slice", _T, np.array([1, 0, 0], np.int32), np.array([1, -1, 2], np.int32), to=(1, 1))
_case("Slice", Batch(("B", 4)), np.array([0, 1], np.int32), ShapeOf(("B", 2)))
_bits = options(begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)


def _slices(*numbers: Any, **masks: int) -> Tuple[Any, Dict[str, int]]:
    begin, end, strides = numbers
    return [np.array(one, np.int32) for one in (begin, end, strides)], {**_bits, **masks}


for _to, (_numbers, _masks) in [
    ((0, 1), _slices([0, 0], [0, 2], [1, 1], begin_mask=1, end_mask=1)),
    ((1, 1), _slices([1, 0], [2, 0], [1, 1], begin_mask=2, end_mask=2)),
    ((0, 1), _slices([1, 0], [2, 0], [1, 1], begin_mask=2, end_mask=2, shrink_axis_mask=1)),
    ((2, 1), _slices([0, 0], [0, 1], [1, 1], ellipsis_mask=1, new_axis_mask=0, shrink_axis_mask=2)),
    ((1, 1), _slices([0, 0], [0, 0], [1, 1], new_axis_mask=1, begin_mask=2, end_mask=2)),
]:
    _of = {(0, 1): B3, (1, 1): _T, (2, 1): Batch((1, 2, "B", 3))}[_to]
    _of = _T if _masks["shrink_axis_mask"] == 1 else (B3 if _masks["new_axis_mask"] else _of)
    _case("StridedSlice", _of, *_numbers, to=_to, **_masks)
_numbers, _masks = _slices([0, 0], [0, 2], [1, 1], begin_mask=1, end_mask=1)
_case("StridedSliceGrad", ShapeOf(("B", 3)), *_numbers, Batch(("B", 2)), **_masks)
_numbers, _masks = _slices([1, 0], [2, 0], [1, 1], begin_mask=2, end_mask=2, shrink_axis_mask=1)
_case("StridedSliceGrad", ShapeOf((2, "B", 3)), *_numbers, B3, to=(1, 1), **_masks)
_pads = np.array([[0, 0], [1, 1]], np.int32)
_case("Pad", B3, _pads)
_case("PadV2", B3, _pads, F(1))
_case("MirrorPad", B3, _pads, mode="REFLECT")
_case("MirrorPadGrad", Batch(("B", 5)), _pads, mode="REFLECT")
_case("Tile", _T, np.array([2, 1, 3], np.int32), to=(1, 1))
_case("Tile", B3, np.array([2, 1], np.int32), to=[None])
_case("Tile", np.ones([1, 3], F), ShapeOf(("B", 2)))
_case("Tile", np.arange(6, dtype=F).reshape([2, 3]), ShapeOf(("B", 1)), to=(0, 2))
_case("ReverseV2", _T, np.array([0, 2], np.int32), to=(1, 1))
_case("ReverseSequence", B3, Batch(("B",), "int"), seq_dim=1, batch_dim=0)
_case("ReverseSequence", _T, np.array([2, 1], np.int32), seq_dim=2, batch_dim=0, to=(1, 1))
_case("Roll", _T, np.array([1, 2], np.int32), np.array([0, 2], np.int32), to=(1, 1))
_case("OneHot", Batch(("B", 3), "int"), np.int32(4), F(1), F(0), axis=-1)
_case("OneHot", Batch(("B", 3), "int"), np.int32(4), F(1), F(0), axis=0, to=(1, 1))
_table = np.random.RandomState(2).randn(4, 5).astype(F)
_case("Gather", _table, Batch((2, "B"), "int"), to=(1, 1))
_case("GatherV2", _table, Batch((2, "B"), "int"), np.int32(1), to=(2, 1))
_case("GatherV2", Batch(("B", 4)), np.array([[0, 2], [1, 1]], np.int32), np.int32(1))
_case("GatherV2", Batch((4, "B")), np.array([[0, 2], [1, 1]], np.int32), np.int32(0), to=(2, 1))
_case("GatherV2", Batch(("B", 4)), Batch(("B", 2), "int"), np.int32(1), batch_dims=1)
_case("GatherNd", _table, Batch(("B", 3, 1), "int"))
