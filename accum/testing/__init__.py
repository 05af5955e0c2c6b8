"""Check accumulation against the full batch, and one run against another.

    assert_accumulation_equals_full_batch   trains your own model both ways and compares it step by step
    record, compare                         write a run to a file step by step, and compare two such files

Recordings need only NumPy, but `import accum` needs TensorFlow. Without TensorFlow, `python -m accum compare` compares
recordings that were made elsewhere.
"""

from accum.testing._compare import Comparison, Divergence, Pair, compare
from accum.testing._equality import assert_accumulation_equals_full_batch
from accum.testing._record import Recorder, record
from accum.testing._report import EqualityReport

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
