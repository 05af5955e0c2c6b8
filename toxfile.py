"""What tox itself lacks: `tox run --discard` removes an environment as soon as its commands have passed.

An environment of the matrix is about a gigabyte, all of them are fifty. One that fails stays, to be looked into.
"""

import shutil

from tox.plugin import impl


@impl
def tox_add_option(parser):
    parser.add_argument("--discard", action="store_true", help="remove each environment when its commands have passed")


@impl
def tox_after_run_commands(tox_env, exit_code):
    if tox_env.options.discard and exit_code == 0:
        shutil.rmtree(str(tox_env.env_dir), ignore_errors=True)
