"""Public TensorFlow 1 programs, and how project/programs.py runs them."""

from public_programs import bert, gans, images, language, others

PROGRAMS = {**bert.PROGRAMS, **language.PROGRAMS, **images.PROGRAMS, **gans.PROGRAMS, **others.PROGRAMS}
