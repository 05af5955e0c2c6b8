"""The table of what a version cannot do has no row that excuses nothing."""

import os

import exceptions
import pytest


@pytest.mark.per_version
def test_every_row_of_the_table_names_a_test_of_this_version(request):
    if not all(os.path.isdir(argument) for argument in request.config.args):
        pytest.skip("only some files were collected")
    assert exceptions.idle(request.config.collected) == []
