"""Version of hookcb: its only place, which the build reads too."""

__version__ = "0.2.0"
