"""Public TensorFlow 1 programs, and how scripts/dev/programs.py runs them."""

from public_programs import bert, images, language, others

PROGRAMS = {**bert.PROGRAMS, **language.PROGRAMS, **images.PROGRAMS, **others.PROGRAMS}
