"""All differences between TensorFlow and Keras lines, named after their meaning.

No other part of the package looks at a version or probes TensorFlow. Supporting a new TensorFlow line means editing
these files. A comment at each branch says with which line it dies.
"""

from accum._tf._batch_norm import (
    BATCH_NORM_BASES,
    BATCH_NORMS,
    batch_norms_over_replicas,
    call_batch_norm,
    is_fused,
    is_synchronized,
    records_unbiased_variance,
    unfused,
    uses_mask,
)
from accum._tf._graphs import (
    LOCKS,
    are_traces_of_one_function,
    control_flow_for,
    count_calls,
    exclude_each_other,
    forget_traces,
    graphs_within,
    in_static_graph,
    is_function,
    is_loop_body,
    is_of_a_cluster,
    is_ref_variable,
    is_tracing,
    record_train_op,
    save_as_part,
    slice_info,
    unrecorded,
    untouched_by_autograph,
)
from accum._tf._inner_optimizer import (
    apply_inner,
    as_operation,
    awaited,
    build_inner,
    create_graph_slots,
    prepare_inner,
    refused_by_inner,
    scale_gradient,
    slot_names,
    without_sum_of_one,
)
from accum._tf._layers import (
    DEPTHWISE_CONVOLUTIONS,
    EINSUM_LAYERS,
    TRANSPOSED_CONVOLUTIONS,
    is_no_real_call,
)
from accum._tf._losses import (
    LOSS_CONTAINER,
    count_examples,
    loss_denominator,
    sums_over_examples,
    unpack_data,
    without_empty_masks,
)
from accum._tf._models import (
    Functional,
    bound_to,
    compute_dtypes,
    deserialize_compile_config,
    is_layered_model,
    layers_of,
    model_from_plain_config,
    model_like,
    not_made_as_functional,
    pickled_by_name,
    plain_config,
    registered_name,
    registered_object,
    set_untracked,
    shape_built_for,
    train_on,
    unpickled,
)
from accum._tf._optimizer_state import (
    CONVERTS,
    WITH_ROWS,
    average_variable,
    embeddings_of,
    has_odd_centering,
    has_rate_in_momentum,
    hyperparameter,
    is_epsilon_beside_root,
    is_of_several_replicas,
    moves_touched_rows_only,
    rate_of_step,
    rule_name,
    slot_variable,
    write_bundle,
)
from accum._tf._optimizers import (
    FOR_STATIC_GRAPHS,
    LegacyOptimizer,
    NewOptimizer,
    aggregated,
    copy_of,
    deserialize_keras_optimizer,
    get_keras_optimizer,
    is_graph_optimizer,
    is_keras_optimizer,
    is_loss_scale_optimizer,
    is_new_optimizer,
    is_optimizer_config,
    is_sync_replicas_optimizer,
    legacy_adam,
    loss_scale_around,
    register_keras_class,
    serialize_keras_optimizer,
    without_loss_scale,
)
from accum._tf._steps import (
    build_loss_trackers,
    compiled_unless_eager,
    count_batch,
    intercepting_loss_scale,
    is_compiled_by_xla,
    loss_trackers,
    must_not_be_in_loop,
    own_methods,
    raw_result,
    state_of,
    steps_per_execution,
    without_optionals,
)
from accum._tf._strategies import (
    count_local_replicas,
    is_central_storage,
    is_parameter_server,
    per_replica_maker,
)
from accum._tf._tracking import (
    CheckpointOnly,
    TrackedAsInner,
    begin_as_optimizer,
    read_checkpoint,
    stop_automatic_tracking,
    track,
)
from accum._tf._types import (
    AccumSteps,
    Gradient,
    GradsAndVars,
    MicroBatchSize,
    MicroBatchWeight,
    Names,
    Scalar,
    Transform,
)
from accum._tf._variables import (
    at_least_float32,
    is_overwritten,
    known_value,
    native,
    new_counter,
    new_keras_variable,
    new_statistic,
    on_host,
    path_of,
    set_variable,
    values_of,
    variable_key,
)
from accum._tf._version import HAS_KERAS_FACE, IS_KERAS_3, tf
from accum._tf._watching import (
    tell_watcher,
    unwatched,
    watching_optimizers,
)
