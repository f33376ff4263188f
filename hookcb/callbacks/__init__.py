"""The callbacks that come with hookcb, one small file each."""

from hookcb.callbacks.activations import ActivationStats
from hookcb.callbacks.hook import HookCallback
from hookcb.callbacks.metrics import Metrics
from hookcb.callbacks.progress import Progress
from hookcb.callbacks.recorder import Recorder

__all__ = ["ActivationStats", "HookCallback", "Metrics", "Progress", "Recorder"]
