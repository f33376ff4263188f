"""Runs a script in a process started by `tests.support.start`."""

import gc
import multiprocessing
import os
import runpy
import sys

import torch


def run(argv, log, environment):
    """Act like `python *argv` in this environment, with its output in the file `log`, and with one thread."""
    gc.freeze()  # what is imported lives to the end: a million objects that no collection has to look at
    os.environ.clear()  # it is that of the process from which this one was forked
    os.environ.update(environment)
    # whatever the flags of that process: each of these would compile all that it imports beside torch
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    torch.set_num_threads(1)  # a variable of the environment comes too late
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # or a worker of a DataLoader would be forked from a process that first imports torch
    multiprocessing.set_start_method(None, force=True)
    how, *sys.argv = argv if argv[0] in ("-c", "-m") else ("", *argv)
    if how == "-c":
        exec(compile(sys.argv[0], "<string>", "exec"), {"__name__": "__main__"})
    elif how == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
