"""What a test expects of warnings: their texts, or none at all."""

import contextlib
import warnings


@contextlib.contextmanager
def silent(category=UserWarning):
    """A warning in here is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        yield


@contextlib.contextmanager
def warned(containing="", category=UserWarning):
    """Yield a list, which has the texts of the warnings that were given in here once it ends."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    said = [str(one.message) for one in caught if issubclass(one.category, category)]
    texts += [text for text in said if containing in text]
