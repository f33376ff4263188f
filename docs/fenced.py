"""Puts the examples of docstrings into code blocks: an extension of griffe, which mkdocs.yml names."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # to the next empty line


class Fenced(Extension):
    """Fences `>>>` in the docstring of each object."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Changes the docstring that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
