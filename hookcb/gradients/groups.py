"""Statistics of several parameters together, from those that were recorded of each."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ADDED = ("norm", "clipped_norm", "rms", "abs_max", "nonfinite", "weight_norm")  # those that can be merged


def merged_series(stat: str, columns: Mapping[str, Tensor], n: Sequence[int]) -> Tensor:
    """One statistic of several parameters together in each record, `(records,)`, as if they were one.

    A norm is the root of the sum of squares. A parameter without a gradient in a record counts as none there,
    but for the norm of weights; NaN if no parameter has one.

    Args:
        stat: one of `ADDED`.
        columns: values by statistic, `(n_params, records)`, of `stat` and of "nonfinite".
        n: number of elements of each parameter.

    Raises:
        ValueError: If the statistic of several parameters does not follow from those of each.
    """
    if stat not in ADDED:
        raise ValueError(
            f"{stat} of several parameters does not follow from that of each; these do: {', '.join(ADDED)}"
        )
    x = columns[stat].double()
    has_any = ~x.isnan() if stat == "weight_norm" else ~columns["nonfinite"].isnan()
    sizes = torch.tensor(n, dtype=torch.float64, device="cpu")[:, None] * has_any
    known = x.where(has_any, 0.0)
    if stat == "nonfinite":
        found = known.sum(0)
    elif stat == "abs_max":
        found = known.amax(0)
    elif stat == "rms":
        found = ((known.square() * sizes).sum(0) / sizes.sum(0)).sqrt()
    else:
        found = torch.linalg.vector_norm(known, dim=0)
    return found.where(has_any.any(0), torch.nan)
