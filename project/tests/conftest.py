"""The tests of the scripts beside them, which need no TensorFlow: `tox run -e lint` runs them."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
