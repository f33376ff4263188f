"""ActivationReport: statistics of layers' outputs in the last record, as a table."""

import math
from dataclasses import dataclass

from hookcb.records.plots import sparkline
from hookcb.records.tables import COUNT, Column, Ranked, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRow(Ranked):
    """A layer in an `ActivationReport`.

    Attributes:
        type: class of the layer.
        shape: shape of its last output.
        last: statistics of the last record, by name; NaN if the layer was not called.
        spread: standard deviation in each record.
        mark: codes of the findings about the layer, the worst first; "" without any.
    """

    type: str
    shape: tuple[int, ...]
    last: dict[str, float]
    spread: list[float]
    mark: str

    @property
    def note(self) -> str:
        """Whether the layer was not called, or the number of NaN and infinite elements."""
        nonfinite = self.last["nonfinite"]
        if math.isnan(nonfinite):
            return "not called in this batch"
        return f"{nonfinite:,.0f} NaN or inf" if nonfinite else ""

    def text(self, stat: str, form: str = ".3g") -> str:
        """A number of the last record; "" if the layer was not called, or a share is unknown."""
        value, is_share = self.last[stat], form.endswith("%")
        is_unknown = math.isnan(self.last["nonfinite"]) or (is_share and math.isnan(value))
        return "" if is_unknown else format(value, form)


# columns of every report on layers' outputs or their gradients
FIRST_COLUMNS: tuple[Column[ActivationRow], ...] = (
    COUNT,
    Column("type", lambda row: row.type, 4, is_text=True),
    Column("output", lambda row: "×".join(map(str, row.shape)), 6),
)
LAST_COLUMNS: tuple[Column[ActivationRow], ...] = (
    Column("std, trend", lambda row: sparkline(row.spread, 10), 5),
    Column("note", lambda row: row.note, is_text=True),
    Column("look at", lambda row: row.mark, is_text=True, style="yellow"),
)


class ActivationReport(Report[ActivationRow]):
    """Statistics of layers in the last recorded batch."""

    missing = "the report has no layer"
    columns = (
        *FIRST_COLUMNS,
        Column("mean", lambda row: row.text("mean"), 3),
        Column("std", lambda row: row.text("std"), 1),
        Column("near zero", lambda row: row.text("near_zero", ".0%"), 2),
        *LAST_COLUMNS,
    )
