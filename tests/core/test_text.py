"""Text for quantities."""

from hookcb.core.text import format_bytes
from tests.support import in_turn


@in_turn(
    ("n", "text"),
    [(None, ""), (0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (-1500, "-1.5 kB"), (2.4, "2 bytes")],
)
def test_bytes_have_a_decimal_unit(n, text):
    assert format_bytes(n) == text
