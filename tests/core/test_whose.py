"""Whose code runs, told by its file."""

import inspect

import pytest
import torch

from hookcb.core import loop, whose

OTHER = torch.__file__.replace("torch/__init__", "torchvision/models/resnet")
LIKE_OURS = loop.__file__.replace("hookcb/core", "hookcb_experiments")


@pytest.mark.parametrize(
    ("file", "is_of_program", "is_of_user"),
    [
        (torch.nn.functional.__file__, False, False),
        (loop.__file__, False, False),
        (inspect.__file__, False, False),
        ("<frozen importlib._bootstrap>", False, False),
        (OTHER, True, False),
        ("/tmp/ipykernel_1/2.py", True, True),
        ("<stdin>", True, True),
        (LIKE_OURS, True, True),
        (__file__, True, True),
    ],
)
def test_a_file_is_of_the_program_the_user_or_neither(file, is_of_program, is_of_user):
    assert whose.is_of_program(file) == is_of_program
    assert whose.is_of_user(file) == is_of_user
