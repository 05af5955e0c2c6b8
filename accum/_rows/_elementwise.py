"""Rules of operations that compute each entry of their output from entries in the same place."""

from accum._rows._rules import Meets, Op, Outcome, names, rule
from accum._rows._states import Layout

UNARY = names("""
    Abs Acos Acosh Angle Asin Asinh AsString Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1
    BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bucketize Cast Ceil CheckNumerics CheckNumericsV2
    ComplexAbs Conj Cos Cosh Dawsn Digamma Elu EncodeBase64 EnsureShape Erf Erfc Erfinv Exp Expint Expm1
    FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin GuaranteeConst Identity Imag Invert IsFinite IsInf
    IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PopulationCount PreventGradient Real
    Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign
    Spence Sqrt Square StaticRegexFullMatch StaticRegexReplace StopGradient StringLength StringLower StringStrip
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Tan Tanh
    UnicodeTranscode ZerosLike
    """)

SEVERAL = names("""
    Add AddN AddV2 ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue
    Complex Div DivNoNan EluGrad Equal FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars
    FakeQuantWithMinMaxVarsPerChannel FloorDiv FloorMod Greater GreaterEqual Igamma IgammaGradA Igammac
    LeakyReluGrad LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter
    NotEqual Polygamma Pow RandomGammaGrad RealDiv ReciprocalGrad RegexFullMatch RegexReplace Relu6Grad ReluGrad
    RightShift RsqrtGrad
    SelectV2 SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference StringJoin Sub Substr TanhGrad
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
    """)


@rule(*UNARY, *SEVERAL)
def elementwise(op: Op) -> Layout:
    """Operands are aligned from the last axis; one without rows must be broadcast along the examples."""
    rank = op.output_rank()
    places = {op.must(index).on(op.must(index).axis - op.rank(index)) for index in op.batched}
    if len(places) != 1:
        raise Meets("the examples are on different axes of its inputs")
    place = places.pop()
    for index in range(op.count):
        if op.layout(index) is None and not is_broadcast(op, index, place.axis):
            raise Meets(f"nothing proves that input {index} is the same for all examples")
    return place.on(place.axis + rank)


def is_broadcast(op: Op, index: int, axis: int) -> bool:
    """Whether an input has one entry on an axis, counted from the last, or does not have the axis."""
    dims = op.dims(index)
    return len(dims) < -axis or dims[axis] == 1


@rule("Select")
def select(op: Op) -> Layout:
    """Both values have one shape; a condition with a single axis belongs to the first of theirs."""
    layout = op.same([1, 2])
    condition, rank = op.layout(0), op.rank(1)
    is_scalar = condition is None and op.rank(0) == 0
    is_of_first_axis = condition == layout and layout.axis == 0 and op.rank(0) == 1
    is_alike = condition == layout and op.rank(0) == rank
    is_along_others = condition is None and op.rank(0) == 1 and rank > 1 and layout.axis != 0
    if not (is_scalar or is_of_first_axis or is_alike or is_along_others):
        raise Meets("its condition has the examples on another axis")
    return layout


@rule("Bitcast")
def bitcast(op: Op) -> Layout:
    """An axis may be added at the end, or removed there."""
    layout = op.one()
    if op.output_rank() < op.rank() and layout.axis == op.rank() - 1:
        raise Meets("the examples are on the axis that it removes")
    return layout


@rule("FakeQuantWithMinMaxVarsGradient")
def fake_quant_gradient(op: Op) -> Outcome:
    """The gradients by the limits are sums over all entries."""
    op.only(0, 1)
    return Outcome([op.same([0, 1]), None, None], "sum")


@rule("FakeQuantWithMinMaxVarsPerChannelGradient")
def fake_quant_gradient_by_channel(op: Op) -> Outcome:
    """The gradients by the limits are sums over all axes but the last."""
    op.only(0, 1)
    layout = op.same([0, 1])
    if layout.axis == op.rank() - 1:
        raise Meets("the examples are on the axis of the limits")
    return Outcome([layout, None, None], "sum")


@rule("RandomUniformInt", shapes=(0,))
@rule("RandomStandardNormal", "RandomUniform", "TruncatedNormal", shapes=(0,))
@rule("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal", shapes=(0,))
@rule("StatelessRandomUniformInt", "StatelessRandomUniformFullInt", shapes=(0,))
@rule("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", shapes=(0,))
@rule("StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2", shapes=(0,))
@rule("StatefulUniform", "StatefulStandardNormalV2", "StatefulTruncatedNormal", "StatefulUniformFullInt", shapes=(2,))
@rule("StatefulUniformInt", shapes=(2,))
def random(op: Op) -> Outcome:
    """Numbers of a shape: those of an example are drawn for it."""
    op.only()
    return Outcome([from_shape(op, 2 if op.type.startswith("Stateful") else 0)], "random")


@rule("Multinomial", "StatelessMultinomial")
def multinomial(op: Op) -> Outcome:
    """Draws for each row of logits."""
    layout = op.one()
    if layout.axis != 0:
        raise Meets("the examples are on the axis of the classes")
    return Outcome([layout], "random")


@rule("Fill", shapes=(0,))
def fill(op: Op) -> Layout:
    """One number in a whole tensor."""
    op.only()
    return from_shape(op, 0)


def from_shape(op: Op, index: int) -> Layout:
    """Return the layout of an output whose entries are all alike, with a shape that an input gives."""
    shapes = op.by_size(index)
    (axis, factor), *others = op.multiples().items() or [(-1, 0)]
    layout = Layout(axis, factor)
    if others or axis < 0 or not op.layout_is(layout, [shape[axis] for shape in shapes]):
        raise Meets("the length of an axis is no multiple of the number of examples")
    return layout


@rule("BroadcastTo", shapes=(1,))
def broadcast_to(op: Op) -> Layout:
    """As `elementwise`, with a shape as the other operand."""
    op.only(0)
    layout = op.layout(0)
    if layout is not None:
        return layout.on(layout.axis - op.rank() + op.output_rank())
    made = from_shape(op, 1)
    if not is_broadcast(op, 0, made.axis - op.output_rank()):
        raise Meets("nothing proves that its input is the same for all examples")
    return made
