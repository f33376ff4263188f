"""Further kinds of healthy training runs, some of which a diagnosis might misread."""

from case import Case
from changes import CHANGE_CONTROLS
from facts_data import FACTS_DATA_CONTROLS
from facts_flags import FACTS_FLAGS_CONTROLS
from facts_grads import FACTS_GRADS_CONTROLS
from facts_left import FACTS_LEFT_CONTROLS
from facts_nan import FACTS_NAN_CONTROLS
from facts_valid import FACTS_VALID_CONTROLS
from language_controls import LANGUAGE_CONTROLS
from large_controls import LARGE_CONTROLS
from more_controls_losses import LOSS_CONTROLS
from more_controls_nets import NET_CONTROLS
from more_controls_runtime import RUNTIME_CONTROLS
from more_controls_steps import STEP_CONTROLS
from spikes import SPIKE_CONTROLS
from stranger_controls import STRANGER_CONTROLS
from time_controls import TIME_CONTROLS

MORE_CONTROLS: list[Case] = [
    *FACTS_NAN_CONTROLS,
    *FACTS_DATA_CONTROLS,
    *FACTS_FLAGS_CONTROLS,
    *NET_CONTROLS,
    *LOSS_CONTROLS,
    *STEP_CONTROLS,
    *RUNTIME_CONTROLS,
    *STRANGER_CONTROLS,
    *LANGUAGE_CONTROLS,
    *LARGE_CONTROLS,
    *TIME_CONTROLS,
    *SPIKE_CONTROLS,
    *CHANGE_CONTROLS,
    *FACTS_GRADS_CONTROLS,
    *FACTS_LEFT_CONTROLS,
    *FACTS_VALID_CONTROLS,
]
