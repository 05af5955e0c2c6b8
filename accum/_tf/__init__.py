"""Every difference between TensorFlow and Keras lines, under the name of what it means.

Nothing else in the package looks at a version or probes TensorFlow. A new TensorFlow line is an edit of these files;
each branch says with which line it dies.
"""

from accum._tf._batch_norm import (
    BATCH_NORM_BASES,
    BATCH_NORMS,
    call_batch_norm,
    is_fused,
    is_synchronized,
    records_unbiased_variance,
    unfused,
    uses_mask,
)
from accum._tf._families import (
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
    is_sync_replicas_optimizer,
    legacy_adam,
    loss_scale_around,
    register_keras_class,
    serialize_keras_optimizer,
    without_loss_scale,
)
from accum._tf._graphs import (
    control_flow_for,
    in_static_graph,
    is_of_a_cluster,
    is_ref_variable,
    is_tracing,
    no_record_of_locks,
    untouched_by_autograph,
)
from accum._tf._inner import (
    apply_inner,
    as_operation,
    awaited,
    build_inner,
    create_graph_slots,
    prepare_inner,
    refused_by_inner,
    scale_gradient,
    slot_names,
)
from accum._tf._kept import (
    CONVERTS,
    has_odd_centering,
    has_rate_in_momentum,
    hyperparameter,
    is_epsilon_beside_root,
    is_of_several_replicas,
    rate_of_step,
    rule_name,
    slot_variable,
    write_bundle,
)
from accum._tf._layers import (
    DEPTHWISE_CONVOLUTIONS,
    EINSUM_LAYERS,
    TRANSPOSED_CONVOLUTIONS,
    is_no_real_call,
)
from accum._tf._line import (
    HAS_KERAS_FACE,
    IS_KERAS_3,
    tf,
)
from accum._tf._losses import (
    LOSS_CONTAINER,
    count_examples,
    loss_denominator,
    unpack_data,
)
from accum._tf._models import (
    Functional,
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
from accum._tf._strategies import (
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
from accum._tf._variables import (
    at_least_float32,
    is_overwritten,
    known_value,
    native,
    new_keras_variable,
    new_statistic,
    on_host,
    path_of,
    set_variable,
    values_of,
    variable_key,
)
