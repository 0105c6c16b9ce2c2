"""What a measurement has to say beside its number: the machine, the versions, and how the time was taken."""

import datetime
import platform
import statistics
import time

import torch

from ._ops import flash_attn_2_cuda
from ._version import __version__


def cpu_name():
    """The processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine():
    """One row that says where a number was seen."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "isa": flash_attn_2_cuda.cpu_isas()[-1],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flash_attn": __version__,
    }


def alternate(functions, rounds):
    """Calls functions in turn, round after round, so that a slow minute of the machine hits all of them alike.

    Returns the seconds of each function in each round; one call of each before the first round is not measured.
    """
    for function in functions:
        function()
    seconds = [[] for _ in functions]
    for _ in range(rounds):
        for function, times in zip(functions, seconds):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return seconds


def speedup(baseline, ours):
    """How many times as fast, from the seconds of alternating rounds: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(baseline, ours))
