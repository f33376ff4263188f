"""Training runs with one planted fault each."""

from case import Case
from changes import CHANGES
from facts_data import FACTS_DATA_FAULTS
from facts_flags import FACTS_FLAGS_FAULTS
from facts_grads import FACTS_GRADS_FAULTS
from facts_left import FACTS_LEFT_FAULTS
from facts_loads import FACTS_LOADS_FAULTS
from facts_nan import FACTS_NAN_FAULTS
from facts_valid import FACTS_VALID_FAULTS
from facts_weights import FACTS_WEIGHTS_FAULTS
from faults_data import DATA_FAULTS
from faults_language import LANGUAGE_FAULTS
from faults_large import LARGE_FAULTS
from faults_layers import LAYER_FAULTS
from faults_numbers import NUMBER_FAULTS
from faults_optim import OPTIM_FAULTS
from faults_rare import RARE_FAULTS
from faults_time import TIME_FAULTS
from spikes import SPIKES

FAULTS: list[Case] = [
    *FACTS_DATA_FAULTS,
    *FACTS_FLAGS_FAULTS,
    *LAYER_FAULTS,
    *OPTIM_FAULTS,
    *DATA_FAULTS,
    *NUMBER_FAULTS,
    *LANGUAGE_FAULTS,
    *LARGE_FAULTS,
    *TIME_FAULTS,
    *SPIKES,
    *CHANGES,
    *RARE_FAULTS,
    *FACTS_NAN_FAULTS,
    *FACTS_GRADS_FAULTS,
    *FACTS_WEIGHTS_FAULTS,
    *FACTS_LEFT_FAULTS,
    *FACTS_LOADS_FAULTS,
    *FACTS_VALID_FAULTS,
]
