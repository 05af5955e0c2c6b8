"""The cycle of one layer's moving statistics: a model's optimizer keeps the clock, or the layer's own calls do."""

from accum import _replicas, _tf
from accum._host import Companion
from accum._moments import KeptMoments, with_bessel
from accum._replicas import local_variable, true_after
from accum._tf import tf


class MovingStatistics(_tf.CheckpointOnly, Companion):
    """Keeps the moments of a cycle, and moves a layer's `moving_mean` and `moving_variance` at its end.

    Args:
      layer: a built or unbuilt batch normalisation.
      accum_steps: int >= 1, the calls a cycle where no optimizer is followed.

    Attributes:
      places: one `KeptMoments` for each time that a micro step of a model calls the layer, in order.
      alone: `KeptMoments` of the calls that the layer counts by itself, or None.
      calls: [] per replica, how many of them there were in the current cycle, or None.
    """

    def __init__(self, layer, accum_steps):
        super().__init__()
        self.places = []
        self.alone = None
        self.calls = None
        # Nothing that a checkpoint or the list of a model's layers should see.
        self.__dict__["_layer"] = layer
        self.__dict__["accum_steps"] = accum_steps
        self.__dict__["_clocks"] = {}  # replica -> (the optimizer whose micro step is on its way, calls so far)

    @property
    def is_bare(self):
        """Whether a call of the layer on this replica now is to be Keras' own."""
        clock, _ = self._clock()
        return self.accum_steps == 1 if clock is None else clock.is_bare

    def weight_of(self):
        """A function that gives the weight of the micro-batch that this replica is taking in; None: all are 1."""
        clock, _ = self._clock()
        return None if clock is None or clock.weight_now is None else lambda: clock.weight_now

    def follow(self, clock):
        """Follow an accumulating optimizer from this replica's next call on; None: count calls again."""
        self._clocks[_replicas.replica_number()] = clock, 0

    def receive(self, moments):
        """Take in the moments of one call in training."""
        clock, number = self._clock()
        if clock is None:
            return self._count(moments)
        self._clocks[_replicas.replica_number()] = clock, number + 1
        clock.accompany(self)
        return self._place(number).receive(moments)

    def _clock(self):
        return self._clocks.get(_replicas.replica_number(), (None, 0))

    # ------------------------------------------------------------------------------------------------------------
    # By the clock of an optimizer

    def keep(self, is_first):
        self.follow(self._clock()[0])
        return true_after([place.keep(is_first) for place in self.places])

    def settle(self, is_first, has_latest):
        self.follow(self._clock()[0])
        return self._move([place.whole(is_first, has_latest) for place in self.places])

    def _place(self, number):
        with tf.init_scope():
            if number == len(self.places):
                self.places.append(self._new_moments("place_{}".format(number)))
        return self.places[number]

    # ------------------------------------------------------------------------------------------------------------
    # By the layer's own calls

    def _count(self, moments):
        """Keep the moments of a call, or move on the last of a cycle."""
        with tf.init_scope():
            if self.alone is None:
                self.alone = self._new_moments("alone")
                self.calls = _tf.new_statistic(self._layer.name + "/calls", [], tf.float32)
        calls = local_variable(self.calls)
        place = calls.read_value()
        is_last = place + 1.0 >= float(self.accum_steps)
        with tf.control_dependencies([self.alone.receive(moments)]):
            done = tf.cond(
                is_last,
                lambda: self._move([self.alone.whole(False, True)]),
                lambda: self.alone.keep(tf.equal(place, 0.0)),
            )
        with tf.control_dependencies([done]):
            return calls.assign(tf.where(is_last, 0.0, place + 1.0), read_value=False)

    def flush(self):
        """Move by the unfinished cycle of calls, if there is one. Returns what to wait for, or None."""
        return self._end_cycle(lambda: self._move([self.alone.whole(False, False)]))

    def reset(self):
        """Discard the unfinished cycle of calls. Returns what to wait for, or None."""
        return self._end_cycle(lambda: true_after([]))

    def _end_cycle(self, function):
        if self.calls is None:
            return None
        return _replicas.across_replicas(lambda strategy: _replicas.on_each(strategy, self._on_end, [function]))

    def _on_end(self, function):
        calls = local_variable(self.calls)
        done = tf.cond(calls.read_value() > 0.0, function, lambda: true_after([]))
        with tf.control_dependencies([done]):
            return true_after(calls.assign(0.0, read_value=False))

    # ------------------------------------------------------------------------------------------------------------

    def _move(self, wholes):
        """Move as Keras' layer would, once for each of `wholes` that holds any value."""
        layer, done = self._layer, true_after([])
        for count, mean, variance in wholes:
            if _tf.records_unbiased_variance(layer):
                variance = with_bessel(variance, count)
            with tf.control_dependencies([done]):
                moved = [_moved(_tf.native(layer.moving_mean), mean, count, layer.momentum)]
                moved.append(_moved(_tf.native(layer.moving_variance), variance, count, layer.momentum))
                done = true_after(moved)
        return done

    def _new_moments(self, name):
        mean = _tf.native(self._layer.moving_mean)
        dtype = _tf.at_least_float32(mean.dtype.base_dtype)
        return KeptMoments("{}/{}".format(self._layer.name, name), mean.shape, dtype)


def _moved(variable, value, count, momentum):
    variable = local_variable(variable)
    way = (tf.cast(variable.read_value(), value.dtype) - value) * tf.cast(1.0 - momentum, value.dtype)
    way = tf.where(count > 0.0, way, tf.zeros_like(way))
    return variable.assign_sub(tf.cast(way, variable.dtype.base_dtype), read_value=False)
