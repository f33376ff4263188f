"""Training runs with one planted fault each."""

from case import Case
from facts_nan import FACTS_NAN_FAULTS
from faults_data import DATA_FAULTS
from faults_language import LANGUAGE_FAULTS
from faults_layers import LAYER_FAULTS
from faults_numbers import NUMBER_FAULTS
from faults_optim import OPTIM_FAULTS
from faults_rare import RARE_FAULTS
from faults_time import TIME_FAULTS

FAULTS: list[Case] = [
    *LAYER_FAULTS,
    *OPTIM_FAULTS,
    *DATA_FAULTS,
    *NUMBER_FAULTS,
    *LANGUAGE_FAULTS,
    *TIME_FAULTS,
    *RARE_FAULTS,
    *FACTS_NAN_FAULTS,
]
