"""Represent an array by a few numbers, so that recordings can be compared by them.

    norm = |v|,  mean = sum_i(v_i) / n,  p_j = sum_i(u_ji v_i),  j = 1 ... 8

over the n elements of v in C order, in float64, where the u_ji are independent and uniform on [-1/2, 1/2]: fixed
numbers, from an integer hash of i and j. For two arrays that differ by d, the projections differ by
x_j = sum_i(u_ji d_i), whose expected square is |d|^2 / 12. So

    e = sqrt(12 (x_1^2 + ... + x_8^2) / 8)

estimates |d| to about a fourth, and e^2 is unbiased. It can't be small by chance. By Ball's theorem on sections of the
cube, the density of x_j / |d| is at most sqrt(2) for any d. So the probability of |x_j| <= t |d| is at most
2 sqrt(2) t, and because e^2 >= 1.5 max_j x_j^2,

    P(|d| > c e)  <=  (2 sqrt(2) / (c sqrt(1.5)))^8  =  (2.31 / c)^8.

For c = 10 this is 8e-6, for c = 20 it is 3e-8. (The hash plays the part of chance, because it does not depend on d. Its
32 bits make the distribution discrete, which matters only for t as small as 1e-9.)

Norms alone would miss most mistakes: d is nearly orthogonal to v, so it moves |v| by its square. For a million normal
elements that are off by 1e-3 each, the norms differ by 8e-7 per element, below any tolerance, and e / sqrt(n) is
1.1e-3; elements in reverse order have the same norm. Whole arrays would be exact, but take 102 MB a step for ResNet-50,
where the fingerprints take 32 kB.

The reported number is e / sqrt(n), the root mean square of the differences of the elements. A single element can differ
by sqrt(n) times as much.

Source: K. Ball, "Cube slicing in R^n", Proc. AMS 97 (1986). The hash is the finaliser of SplitMix64: G. Steele, D. Lea,
C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. It only uses integer arithmetic on uint64 and
exact conversion to float64, so the u_ji are the same under every NumPy. The streams of `np.random` are not.
"""

from typing import Dict

import numpy as np

PROJECTIONS = 8
BLOCK = 2**15  # elements that are hashed at once
_CACHED = 16  # blocks whose numbers are kept: 32 MiB
_cache: Dict[int, np.ndarray] = {}


def fingerprint(values):
    """Compute (norm, mean, projections...) of an array, as a float64 array of 2 + 8 numbers.

    Args:
      values: array of numbers or booleans, of any shape; a complex number counts as its real and imaginary parts.

    Raises:
      TypeError: the array holds something else.
    """
    values = as_numbers(values)
    sums = np.zeros(PROJECTIONS + 2)
    for number, start in enumerate(range(0, values.size, BLOCK)):
        block = values[start : start + BLOCK].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            sums[0] += np.dot(block, block)
            sums[1] += block.sum()
            sums[2:] += np.dot(_numbers(number)[:, : block.size], block)
    return np.concatenate([[np.sqrt(sums[0]), sums[1] / max(values.size, 1)], sums[2:]])


def distance(ours, theirs, size):
    """Estimate the root mean square difference of two arrays of `size` elements from their fingerprints."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        return 0.0 if same.all() else float("inf")
    return float(np.sqrt(12.0 * np.mean((ours[2:] - theirs[2:]) ** 2) / max(size, 1)))


def as_numbers(values):
    """Convert `values` to a flat, real array of numbers."""
    values = np.asarray(values)
    if values.dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    if values.dtype.kind not in "fiub" and values.dtype.name != "bfloat16":
        raise TypeError(f"A recorded variable must hold numbers. Received: an array of {values.dtype}.")
    return values.reshape(-1)


def _numbers(block):
    """Return the u_ji of a block: float64 [8, BLOCK]."""
    if block in _cache:
        return _cache[block]
    made = _hashed(np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64))
    if block < _CACHED:
        _cache[block] = made
    return made


def _hashed(indices):
    """Return float64 [8, indices], uniform on [-1/2, 1/2]. Each 64-bit hash gives two of the numbers."""
    rows = []
    for pair in range(PROJECTIONS // 2):
        state = indices * np.uint64(PROJECTIONS // 2) + np.uint64(pair + 1)
        bits = _split_mix(state)
        rows += [bits >> np.uint64(32), bits & np.uint64(2**32 - 1)]
    return (np.stack(rows).astype(np.float64) + 0.5) * 2.0**-32 - 0.5


def _split_mix(state):
    bits = state * np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64, like all operations here
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
