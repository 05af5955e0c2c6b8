"""Lets the scripts of a release import those of contributors and users: import this before them."""

import os
import sys

_SCRIPTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path += [os.path.join(_SCRIPTS, folder) for folder in ("dev", "user")]
