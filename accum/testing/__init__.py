"""What a user checks accumulation with: against the full batch, and one run against another.

    assert_accumulation_equals_full_batch   a model of your own, trained both ways and compared step by step
    record, compare                         a run written down step by step, and compared with another one

Nothing here but the check of a model needs TensorFlow by itself: `python -m accum compare` compares recordings of two
environments in a third that may have none, where `import accum` would ask for it.
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
