"""Explains how each kind of operation turns finite numbers into NaN or infinity, with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwatch.core.number_text import number_text

LARGE = {"float16": 1e2, "float32": 1e15, "bfloat16": 1e15, "float64": 1e150}
"""Magnitudes of inputs from which a product or power may overflow: some orders of magnitude below the square root of
the largest number. Judgement."""


@dataclass(frozen=True, slots=True)
class InputSummary:
    """Summary of the finite values of one input of an operation."""

    dtype: str
    """"number" for an input that is not a tensor."""
    numel: int
    shape: tuple[int, ...]
    low: float
    high: float
    zeros: int
    masked: int = 0
    """Values that are -inf."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an operation gave NaN or infinity, and the remedy."""

    what: str
    """A clause that follows "because"."""
    remedy: str
    overflow: bool = False


LOGARITHMS = frozenset({"log", "log2", "log10", "log1p", "logit", "xlogy", "kl_div", "special_xlogy", "special_logit"})
ROOTS = frozenset({"sqrt", "rsqrt"})
NORMS = frozenset({"norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "matrix_norm", "linalg_matrix_norm"})
DISTANCES = frozenset({"cdist", "pdist", "pairwise_distance", "euclidean_dist", "cosine_similarity"})
QUOTIENTS = frozenset({"div", "divide", "true_divide", "truediv"})
DIVISIONS = QUOTIENTS | {"rtruediv", "reciprocal", "rdiv", "addcdiv", "rsqrt"}
POWERS = frozenset({"pow", "rpow", "float_power", "square"})
EXPONENTIALS = frozenset({"exp", "expm1", "exp2", "sinh", "cosh", "logsumexp"})
ATTENTIONS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin", "gumbel_softmax"}) | ATTENTIONS
ARCS = frozenset({"acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "acosh", "arccosh", "erfinv"})
SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
CROSS_ENTROPIES = frozenset({"cross_entropy", "nll_loss", "nll_loss_nd", "cross_entropy_loss"})
MEANS = frozenset({"mean", "nanmean", *CROSS_ENTROPIES, "mse_loss", "l1_loss", "smooth_l1_loss", "median"})
BINARY_CROSS_ENTROPIES = frozenset({"binary_cross_entropy", "bce_loss"})
CTC = "ctc_loss"

ROUNDING = 1e-4
"""Share of the largest number, 1 at least, under which a negative one may be 0 but for rounding. Judgement: a sum of
1,000 numbers in float32 is off by that."""

SINGULAR = (
    LOGARITHMS | ROOTS | NORMS | DISTANCES | DIVISIONS | POWERS | ARCS | SPREADS | {"prod", "cumprod", "atan2", "hypot"}
)
"""Operations whose derivative is infinite somewhere: their inputs are stored for the backward pass."""


FINITE = "a finite number in place of infinity (torch.finfo(x.dtype).min for -inf)"
"""What to write where infinity is a constant of the code."""


def base(name: str) -> str:
    """The operation behind a name: 'torch.Tensor.__itruediv__' -> 'truediv', 'SqrtBackward0' -> 'sqrt'."""
    last = name.rpartition(".")[2]
    if "Backward" in last:
        last = "".join(f"_{c.lower()}" if c.isupper() else c for c in last.partition("Backward")[0])
    bare = last.strip("_")
    if last.startswith("__i") and last.endswith("__") and bare not in {"invert", "index"}:
        bare = bare[1:]
    return bare


def forward(name: str, inputs: Sequence[InputSummary], *, nan: bool, dtype: str) -> Explanation:
    """Why `name` computed NaN (`nan`) or infinity in `dtype` from finite `inputs`."""
    op, values = base(name), [facts for facts in inputs if facts.dtype != "bool"]
    has_mask = len(values) < len(inputs)
    known = _of_values(op, values, has_mask=has_mask, nan=nan, dtype=dtype)
    return known or _of_sizes(name, op, values, nan=nan, dtype=dtype)


def _of_values(op: str, inputs: Sequence[InputSummary], *, has_mask: bool, nan: bool, dtype: str) -> Explanation | None:
    """A value of the inputs for which `op` has no finite result; None where none is known. `has_mask`: whether a tensor
    of bool is an input, too.
    """
    first = inputs[0] if inputs else None
    if op in LOGARITHMS and first is not None and not (op == "log1p" and first.low > -1):
        return _logarithm(first)
    if op in BINARY_CROSS_ENTROPIES:
        return Explanation("a probability was exactly 0 or 1", "F.binary_cross_entropy_with_logits on logits.")
    if op == CTC:
        return Explanation(
            "a target is longer than its input, or has more repeats than fit: no alignment of the two is possible",
            "nn.CTCLoss(zero_infinity=True), or inputs that are at least as long as their targets.",
        )
    if op in ROOTS and first is not None and first.low < 0:
        remedy = "a clamp: torch.sqrt(x.clamp_min(1e-6))." if _is_rounding(first) else _never_negative("square root")
        return Explanation(
            f"the square root of a negative number (down to {number_text(first.low, 3)}) was taken", remedy
        )
    if op in SPREADS and nan and _of_one(inputs):
        return Explanation(
            "the spread of a single value divides by 0", "correction=0, or more than one value in a batch."
        )
    if op in DIVISIONS and (divisor := _divisor(op, inputs)) is not None:
        how = "0 was divided by 0" if nan else "a number was divided by 0"
        count = f" ({divisor.zeros:,} of {divisor.numel:,} divisors are 0)"
        return Explanation(how + count, "an epsilon in the division: x / (y + 1e-6), or y.clamp_min(1e-6).")
    if op in POWERS and first is not None and nan and first.low < 0:
        remedy = "a clamp of the base: x.clamp_min(1e-6) ** p." if _is_rounding(first) else _never_negative("power")
        return Explanation(f"a negative number (down to {number_text(first.low, 3)}) was raised to a fraction", remedy)
    if op in POWERS and first is not None and first.zeros and not _large(inputs):
        return Explanation("0 was raised to a negative power", "an epsilon: (x + 1e-6) ** p.")
    if op in EXPONENTIALS and first is not None:
        return Explanation(
            f"the exponential of {number_text(first.high, 4)} is more than {dtype} holds",
            "torch.logsumexp or F.log_softmax instead of exp, or a clamp: torch.exp(x.clamp(max=20)).",
            True,
        )
    masked = any(facts.masked for facts in inputs) or (op in ATTENTIONS and has_mask and not _large(inputs))
    if op in SOFTMAXES and nan and masked:
        along, over = "", ""
        if op not in ATTENTIONS:
            along, over = ", along the dim of the softmax,", "a softmax over the dim of the keys or classes, with "
        return Explanation(
            f"a row of its input{along} is fully masked, and the softmax of such a row is NaN",
            f"{over}at least one position left unmasked in every row, or torch.finfo(x.dtype).min in place of -inf.",
        )
    if op in ARCS and first is not None:
        return Explanation(
            f"its argument, from {number_text(first.low, 3)} to {number_text(first.high, 3)}, is outside its domain",
            "a clamp of its argument: x.clamp(-1 + 1e-6, 1 - 1e-6).",
        )
    if op in MEANS and nan and (op in CROSS_ENTROPIES or any(facts.numel == 0 for facts in inputs)):
        weighted = ", or has a class weight of 0" * (op in CROSS_ENTROPIES)
        return Explanation(
            f"it averages over no value: its input is empty, or every target is ignored{weighted}",
            "a test for an empty selection before the mean, or a sum divided by count.clamp_min(1).",
        )
    if op in {"mean", "sum", "add", "sub", "mul"} and any(facts.numel == 0 for facts in inputs):
        return Explanation("there is no value in its input", "a test for an empty selection before it.")
    if nan and any(facts.masked for facts in inputs):
        return Explanation(
            "one of its inputs contains an infinity that is a constant of the code", f"{FINITE}, or a mask after it."
        )
    return None


def _of_sizes(name: str, op: str, inputs: Sequence[InputSummary], *, nan: bool, dtype: str) -> Explanation:
    """How large the inputs are beside what `dtype` holds."""
    peak, most = max(map(_peak, inputs), default=0.0), _most(dtype)
    if not nan and (scaled := _scaled(op, inputs)) is not None:
        return Explanation(f"it {scaled[0]}, and the result is more than {most}", scaled[1], True)
    if dtype == "float16":
        return Explanation(
            f"its input reaches {number_text(peak, 3)} and its output more than {most}",
            'Trainer(precision="bf16-mixed"), or a normalisation before it.',
            True,
        )
    if _large(inputs):
        return Explanation(
            f"its input reaches {number_text(peak, 3)}, and its output more than {most}",
            "a normalisation before it; where it grew in training, Trainer(gradient_clip_val=1.0) or a smaller lr too.",
            True,
        )
    return Explanation(
        f"its input reaches {number_text(peak, 3)} and is finite" if inputs else "it is a constant there",
        f"a look at what goes into {name} with this batch, and an epsilon or a clamp there.",
        not nan,
    )


def constant(name: str, *, nan: bool) -> Explanation:
    """Infinity or NaN that is a constant of the code and reached the loss."""
    instead = "another number than NaN" if nan else FINITE
    return Explanation(
        "the value is a constant of the code, and reached the loss", f"{instead} in {name}, or a mask of the loss."
    )


def backward(node: str, name: str, inputs: Sequence[InputSummary], *, dtype: str) -> Explanation:
    """Why the backward pass of `node`, of the call `name`, computed NaN or infinity from a finite gradient."""
    op, call = base(node), base(name)
    zero = any(facts.zeros for facts in inputs if facts.dtype != "number")
    kinds = {op, call}
    if kinds & ROOTS and (zero or not inputs):
        return Explanation("the slope of a square root at 0 is infinite", "an epsilon inside it: torch.sqrt(x + 1e-6).")
    if kinds & SPREADS:
        return Explanation(
            "the slope of a standard deviation of equal values is infinite", "torch.sqrt(x.var() + 1e-6)."
        )
    if kinds & (NORMS | DISTANCES):
        return Explanation(
            "the slope of a norm at 0 is infinite, or not defined",
            "an epsilon inside it: torch.sqrt(x.square().sum(-1) + 1e-6).",
        )
    if kinds & POWERS and zero:
        return Explanation("the slope of a power below 1 at 0 is infinite", "an epsilon inside it: (x + 1e-6) ** p.")
    if kinds & ARCS:
        return Explanation("its slope at the end of its domain is infinite", "a clamp: x.clamp(-1 + 1e-6, 1 - 1e-6).")
    if kinds & LOGARITHMS:
        return Explanation("the slope of a logarithm next to 0 is infinite", "an epsilon: torch.log(x + 1e-6).")
    if kinds & DIVISIONS:
        return Explanation("a divisor is 0, or so small that its square is", "an epsilon: x / (y.abs() + 1e-6).")
    if kinds & {"prod", "cumprod"}:
        return Explanation(
            "the slope of a product divides by its factors, and one is 0", "a sum of logarithms instead."
        )
    if kinds & SOFTMAXES:
        return Explanation("a row of its input is fully masked", "at least one position left unmasked in every row.")
    return Explanation(
        f"the gradient there is more than {_most(dtype)}, or 0 met infinity",
        'Trainer(precision="bf16-mixed"), or a smaller factor there.'
        if dtype == "float16"
        else "a clamp or epsilon there, or Trainer(gradient_clip_val=1.0) where it grew in training.",
        True,
    )


def _logarithm(facts: InputSummary) -> Explanation:
    remedy = "an epsilon: torch.log(x.clamp_min(1e-6))."
    if facts.low >= 0 and facts.high <= 1:  # these may be probabilities
        remedy = f"F.cross_entropy or F.log_softmax on logits, or {remedy}"
    if facts.low < 0:
        remedy = remedy if _is_rounding(facts) else _never_negative("logarithm")
        return Explanation(
            f"the logarithm of a negative number (down to {number_text(facts.low, 3)}) was taken", remedy
        )
    return Explanation(f"the logarithm of 0 was taken ({facts.zeros:,} of {facts.numel:,} values are 0)", remedy)


def _is_rounding(facts: InputSummary) -> bool:
    """Whether what is negative may be 0 but for rounding."""
    return facts.low >= -ROUNDING * max(1.0, facts.high)


def _never_negative(of: str) -> str:
    """The remedy where a formula is wrong: an epsilon would hide that."""
    return f"a look at the formula of what goes into the {of}, which should not be negative; an epsilon would hide it."


def _divisor(op: str, inputs: Sequence[InputSummary]) -> InputSummary | None:
    """The divisor, if it contains a 0."""
    by = inputs[0] if op in {"reciprocal", "rsqrt", "rtruediv", "rdiv"} or len(inputs) == 1 else inputs[-1]
    return by if by.zeros else None


def _scaled(op: str, inputs: Sequence[InputSummary]) -> tuple[str, str] | None:
    """Which constant makes a tensor large, for the middle of a sentence, and the remedy; None where the tensor does."""
    numbers = [_peak(facts) for facts in inputs if facts.dtype == "number"]
    tensors = [_peak(facts) for facts in inputs if facts.dtype != "number"]
    if len(numbers) != 1 or len(tensors) != 1:
        return None
    number, peak = numbers[0], tensors[0]
    what, constant = f"an input that reaches {number_text(peak, 3)} by", number_text(number, 3)
    if op == "mul" and number > peak:
        return f"multiplies {what} {constant}", f"a smaller factor than {constant} there."
    if op in QUOTIENTS and inputs[-1].dtype == "number" and 0 < number < 1 / max(peak, 1.0):
        return f"divides {what} {constant}", f"a larger divisor than {constant} there."
    return None


def _of_one(inputs: Sequence[InputSummary]) -> bool:
    return any(1 in facts.shape or facts.numel <= 1 for facts in inputs if facts.dtype != "number")


def _large(inputs: Sequence[InputSummary]) -> bool:
    return any(_peak(facts) > LARGE.get(facts.dtype, np.inf) for facts in inputs)


def _peak(facts: InputSummary) -> float:
    return max(-facts.low, facts.high)


def _most(dtype: str) -> str:
    return "the 65,504 that float16 holds" if dtype == "float16" else f"{dtype} holds"
