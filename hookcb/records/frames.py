"""Rows as a DataFrame of pandas or polars."""

from collections.abc import Mapping, Sequence
from typing import Any

from hookcb.core.randomness import random_kept


def frame_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """DataFrame of `rows` with the columns of all of them: of pandas, or of polars if only that is there.

    What a row does not have is missing there.

    Raises:
        ModuleNotFoundError: If neither is installed.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name) for row in rows] for name in columns}
    with random_kept():
        try:
            import pandas

            return pandas.DataFrame(values)
        except ModuleNotFoundError:
            pass
        try:
            import polars

            return polars.DataFrame(values, strict=False)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                "a DataFrame needs pandas or polars, and neither is installed; pip install pandas, "
                "or read .table(), a list of rows"
            ) from missing
