"""Further kinds of healthy training runs, some of which a diagnosis might misread."""

from case import Case
from facts_nan import FACTS_NAN_CONTROLS
from language_controls import LANGUAGE_CONTROLS
from more_controls_losses import LOSS_CONTROLS
from more_controls_nets import NET_CONTROLS
from more_controls_runtime import RUNTIME_CONTROLS
from more_controls_steps import STEP_CONTROLS
from stranger_controls import STRANGER_CONTROLS
from time_controls import TIME_CONTROLS

MORE_CONTROLS: list[Case] = [
    *FACTS_NAN_CONTROLS,
    *NET_CONTROLS,
    *LOSS_CONTROLS,
    *STEP_CONTROLS,
    *RUNTIME_CONTROLS,
    *STRANGER_CONTROLS,
    *LANGUAGE_CONTROLS,
    *TIME_CONTROLS,
]
