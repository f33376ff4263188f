"""Orders of callbacks: at an event, those with a lower number act first.

The first sentence about each name says why it has its place. `python docs/orders.py` makes the table of
docs/guide/training.md from these; if two names have the same number, the table has the first.
"""

LR_FINDER = -100
"""Sets the learning rate before any other callback reads it."""

FREEZE = -90
"""Freezes parameters before any other callback looks at them."""

CHANNELS_LAST = -80
"""Sets the memory layout before anything is compiled or copied."""

DISTRIBUTED = -75
"""Wraps the model once its parameters and their memory layout are set, before it is compiled."""

COMPILE = -70
"""Compiles the model once its memory layout is set."""

ACCUMULATION = -30
"""Decides whether a step is due, and weights the losses, before other callbacks see them."""

PRECISION = -20
"""Unscales gradients before other callbacks read them."""

NONFINITE = -10
"""Checks for NaN and infinity before other callbacks use the loss."""

REPORT = -6
"""Shows the verdict of `Diagnose`: at the end of a fit the first callbacks act last."""

DIAGNOSE = -5
"""Acts before the callbacks that it adds."""

READ = 0
"""Read values that are complete, unscaled and not clipped yet. Users' callbacks act here by default."""

CLIP = 20
"""Clips gradients; after it, they are as the optimizer gets them."""

AVERAGE = 30
"""Averages the weights after a step."""

RECORD = 40
"""Records the loss, and the learning rate of its step."""

METRICS = 50
"""Adds its values to the epoch's row."""

NO_STEP = 50
"""Cancels the step once gradients have been read, in `diagnose(model, batch)`."""

PROGRESS = 60
"""Shows the row."""

SCHEDULE = 70
"""Set the learning rate of the next batch. That of this one has been recorded by then."""

STOP = 80
"""Decide whether there is a next batch."""

NAN_TRACE = 90
"""After all that change the batch, the loss or the random state."""

LOG = 95
"""After everything that it logs, before the checkpoint. Records made between the two would be lost."""

CHECKPOINT = 100
"""Saves the final state of all the others."""

PREDICTIONS = 100
"""Keeps the predictions once all the others have changed them."""

PROFILER = 1001
"""After all others, whose time is in the step that it ends."""

STEP_TIMER = 1002
"""After the profiler too."""
