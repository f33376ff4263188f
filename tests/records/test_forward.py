"""A callback's methods and properties that are those of its records."""

from hookcb.records.forward import forwarded, forwarded_property


class Records:
    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return ["fc"]

    def series(self, layer: str, stat: str = "mean") -> str:
        """One statistic."""
        return f"{layer}: {stat}"


class Owner:
    series = forwarded(Records.series)
    names = forwarded_property(Records.names)

    def __init__(self, records: Records) -> None:
        self.records = records


def test_methods_and_properties_are_those_of_the_records():
    owner = Owner(Records())
    assert owner.series("fc", stat="std") == "fc: std"
    assert owner.names == ["fc"]
    assert Owner.series.__doc__ == "One statistic."
    assert Owner.names.__doc__ == "Names of the layers."


def test_records_that_override_a_method_are_called():
    class Special(Records):
        def series(self, layer: str, stat: str = "mean") -> str:
            return "special"

    assert Owner(Special()).series("fc") == "special"
