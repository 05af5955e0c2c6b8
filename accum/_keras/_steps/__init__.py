"""The steps of a model: on one micro-batch, split, or with a whole batch; and checks while they run."""
