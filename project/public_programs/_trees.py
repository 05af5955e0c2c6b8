"""Import programs from trees of their repositories, and compare what they trained."""

import contextlib
import sys

from tensorflow.python.ops import clip_ops

from accum.testing import sum_duplicate_rows
from accum.testing._deviations import deviation
from public_programs._program import tf, tf1


def is_from(tree, module):
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(path and path.startswith(tree) for path in paths)


@contextlib.contextmanager
def imported_from(tree):
    """Import from a tree, and forget its modules and flags afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, tree)
    try:
        yield
    finally:
        sys.path.remove(tree)
        for name in [name for name in set(sys.modules) - before if is_from(tree, sys.modules[name])]:
            del sys.modules[name]
        for name in list(tf1.flags.FLAGS):
            if not name.startswith(("help", "log", "v", "std", "alsolog", "only_check", "pdb", "run_with", "showpre")):
                with contextlib.suppress(Exception):
                    delattr(tf1.flags.FLAGS, name)


@contextlib.contextmanager
def summed_rows():
    """Let the norms of gradients be those of whole rows, as accumulation passes them."""
    before = tf.clip_by_global_norm

    def clip(gradients, *arguments, **options):
        summed = sum_duplicate_rows(gradients)
        if options.get("use_norm") is not None:  # computed from the slices
            options["use_norm"] = tf.global_norm(summed)
        return before(summed, *arguments, **options)

    modules = (tf, tf1, clip_ops)
    for module in modules:
        module.clip_by_global_norm = clip
    try:
        yield
    finally:
        for module in modules:
            module.clip_by_global_norm = before


def messages_of(caught):
    """Return the texts of warnings, but for those of TensorFlow's own."""
    texts = {str(one.message) for one in caught if issubclass(one.category, UserWarning)}
    own = ("is deprecated and will be removed", "Converting sparse IndexedSlices")
    return {text for text in texts if not any(words in text for words in own)}


def furthest(ours, theirs):
    """The largest difference of a trained variable or the step counter after any step."""
    return max(deviation(one[name], other[name]) for one, other in zip(ours, theirs) for name in other)


def only(names, runs):
    return [{name: values[name] for name in names if name in values} for values in runs]
