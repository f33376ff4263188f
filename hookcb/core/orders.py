"""Orders of callbacks: at an event those with a lower number act first.

Each name is a place in this order; its first sentence says why it is there. README's table is made from
these by `python docs/orders.py`. Of two names with one number the first is that of the table.
"""

FIRST = -1000
"""Before all others: marks where the callbacks' time begins."""

LR_FINDER = -100
"""Sets the rate before anyone reads it."""

FREEZE = -90
"""Before anyone looks at what is trained."""

CHANNELS_LAST = -80
"""The layout in memory, before anything is compiled or copied."""

COMPILE = -70
"""Of the model as it is laid out."""

ACCUMULATION = -30
"""Says whether a step is due, and weighs the losses, before all others see them."""

PRECISION = -20
"""Unscales gradients before anyone reads them."""

NONFINITE = -10
"""Before others take in a loss that is no number."""

DIAGNOSE = -5
"""Ahead of those that it brings."""

READ = 0
"""Read what is whole, unscaled and not clipped yet. This is the default, also of users' callbacks."""

CLIP = 20
"""Behind it gradients are as the optimizer gets them."""

AVERAGE = 30
"""Takes in the weights that a step has given."""

RECORD = 40
"""Keeps the loss, and the rate it was trained with."""

METRICS = 50
"""Completes the epoch's row."""

NO_STEP = 50
"""Cancels the step once gradients have been read, in `diagnose(model, batch)`."""

PROGRESS = 60
"""Shows it."""

SCHEDULE = 70
"""Set the rate of the next batch. That of this one has been recorded by then."""

STOP = 80
"""Decide whether there is one."""

NAN_TRACE = 90
"""Behind all who change batch, loss or random numbers."""

LOG = 95
"""Behind all that it reads, before the checkpoint. What comes between the two would be lost."""

CHECKPOINT = 100
"""Saves what all the others have come to."""

PREDICTIONS = 100
"""Keeps the predictions once all the others have changed them."""

LAST = 1000
"""Behind all others: marks where the callbacks' time ends."""

PROFILER = 1001
"""Outside of what all others do, which counts as callbacks' time."""

STEP_TIMER = 1002
"""Outside of the profiler too."""
