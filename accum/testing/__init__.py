"""What a user checks accumulation with: against the full batch, and one run against another.

    assert_accumulation_equals_full_batch   a model of your own, trained both ways and compared step by step
    record, compare                         a run written down step by step, and compared with another one

Recordings need NumPy alone, but `import accum` needs TensorFlow, and so does what imports this: where there is none,
`python -m accum compare` compares the recordings of two environments that had one.
"""

from accum.testing._compare import Comparison, Divergence, Pair, compare
from accum.testing._equality import EqualityReport, assert_accumulation_equals_full_batch
from accum.testing._record import Recorder, record

__all__ = [
    "Comparison",
    "Divergence",
    "EqualityReport",
    "Pair",
    "Recorder",
    "assert_accumulation_equals_full_batch",
    "compare",
    "record",
]
