"""For every pip; setup.cfg says what there is to say."""

from setuptools import setup

setup()
