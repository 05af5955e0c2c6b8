"""Public TensorFlow 1 programs, and how project/programs.py runs them."""

from public_programs import bert, gans, images, language, others, scenes, sequences

MODULES = (bert, language, images, gans, others, sequences, scenes)
PROGRAMS = {name: program for module in MODULES for name, program in module.PROGRAMS.items()}
