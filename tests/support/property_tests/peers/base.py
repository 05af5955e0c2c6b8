"""What an adapter has."""


class Peer:
    """One run of one case with one library. An object is made for each run.

    Class attributes:
      title: how the page calls it.
      packages: the distributions whose versions the page names.
      optimizers: names of `cases.OPTIMIZERS` that the library has.
      arguments: further names in `case["arguments"]` that its optimizers take.
      not_offered: {law, or law and kind such as "L6 flush": whether the cases can be run anyway}. They count neither
        as passed nor as failed; if they can be run, the page says how far off they are.
      cannot_occur: laws and kinds whose cases do not exist where the library works.
    """

    title = ""
    packages = ()
    optimizers = ()
    arguments = ("clipnorm", "clipvalue", "global_clipnorm", "inverse_time")
    not_offered = {}
    cannot_occur = ()

    @classmethod
    def start(cls, case, initial):
        """Return a run that accumulates, with variables of these initial values."""
        raise NotImplementedError

    @classmethod
    def plain(cls, case, initial):
        """Return an object with `apply(grads)`, `weights()` and `set_weights(values)`: the plain optimizer."""
        raise NotImplementedError

    def take(self, grads, weight):
        """Take the gradients of one micro-batch: None, arrays or `cycles.Rows`."""
        raise NotImplementedError

    def flush(self):
        """Make a step with the unfinished cycle."""
        raise NotImplementedError

    def reset(self):
        """Discard the unfinished cycle."""
        raise NotImplementedError

    def weights(self):
        """Return the variables as arrays."""
        raise NotImplementedError

    def set_weights(self, values):
        raise NotImplementedError

    def step_count(self):
        """Return how many steps the library's public counter reads."""
        raise NotImplementedError

    def slots(self):
        """Return the plain optimizer's variables as arrays, without step counters and sums of gradients."""
        raise NotImplementedError

    def resumed(self, folder):
        """Save everything, and return another run that was restored from it. This one is closed."""
        raise NotImplementedError

    @classmethod
    def batch_norm(cls, case, batches, whole):
        """Return ([moving mean, moving variance] after each cycle, the same of the plain layer at the full batch).

        Args:
          batches: for each cycle the list of its micro-batches' inputs.
          whole: for each cycle the inputs of all.
        """
        raise NotImplementedError

    def close(self):
        pass
