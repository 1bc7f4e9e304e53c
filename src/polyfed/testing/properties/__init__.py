"""The properties, one function each. A function returns where its property holds, else raises `ConformanceError`."""

from __future__ import annotations

from collections.abc import Callable

from polyfed.testing.kit import ConformanceKit
from polyfed.testing.properties import (
    aggregation,
    alone,
    declarations,
    effects,
    losses,
    repeatability,
    states_and_messages,
    unusual_clients,
)

_IN_ORDER: tuple[Callable[[ConformanceKit], None], ...] = (
    declarations.has_hyperparameters,
    declarations.speaks_in_tensors,
    declarations.runs,
    declarations.declared,
    declarations.refused_before_round_1,
    repeatability.same_seed_same_result,
    repeatability.other_seed_other_result,
    repeatability.global_generators_untouched,
    repeatability.data_are_shuffled,
    aggregation.uploads_have_their_form,
    aggregation.order_of_uploads,
    aggregation.client_order_invariant,
    aggregation.any_subset,
    aggregation.missing_upload_is_not_zero,
    aggregation.samples_counted_once,
    unusual_clients.degenerate_clients,
    unusual_clients.batchnorm,
    unusual_clients.begins_alike,
    unusual_clients.nan_is_rejected,
    unusual_clients.unselected_are_left_alone,
    states_and_messages.nothing_aliased,
    states_and_messages.nothing_written_in_place,
    states_and_messages.broadcast_without_side_effects,
    states_and_messages.state_is_explicit,
    states_and_messages.goes_on_after_its_end,
    states_and_messages.scoring_changes_nothing,
    states_and_messages.bytes_metered,
    states_and_messages.expected_bytes,
    losses.loss_is_pure,
    losses.oracle,
    effects.hyperparameters_matter,
    effects.reductions,
    effects.learns,
    alone.alone_with_one_client,
    alone.alone_knows_nobody,
)
PROPERTIES = {check.__name__: check for check in _IN_ORDER}
# where one of these does not hold, no other is asked
FIRST = tuple(
    check.__name__ for check in (declarations.has_hyperparameters, declarations.speaks_in_tensors, declarations.runs)
)
