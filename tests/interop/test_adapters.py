"""Adapters are there only for those who ask for them."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
for name in {names}:
    sys.modules[name] = None
import hookcb
try:
    import hookcb.adapters.{module}
except ModuleNotFoundError as error:
    print(error, "|", error.name)
"""


@pytest.mark.parametrize(
    ("module", "names"),
    [("lightning", ["lightning", "pytorch_lightning"]), ("transformers", ["transformers"])],
)
def test_without_the_package_an_adapter_says_what_to_install(module, names):
    code = WITHOUT.format(module=module, names=names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"this adapter needs {module}: pip install 'hookcb[{module}]' | {module}\n"


def test_hookcb_itself_imports_no_trainer():
    code = (
        "import sys, hookcb; hookcb.Learner, hookcb.adapters;"
        "trainers = 'lightning', 'transformers', 'accelerate', 'ignite', 'skorch';"
        "print([m for m in trainers if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SEEDED = """
import random, numpy, torch
def state():
    own = numpy.random.get_state()
    return random.getstate(), own[1].tobytes(), own[2:], torch.get_rng_state().tolist()
before = state()
import hookcb.adapters.{module}
assert state() == before
"""


@pytest.mark.parametrize("module", ["lightning", "transformers"])
def test_importing_an_adapter_draws_no_random_number(module):
    subprocess.run([sys.executable, "-c", SEEDED.format(module=module)], check=True)
