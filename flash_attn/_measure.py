"""Facts that belong to every measurement: the machine, the versions, and the method of timing."""

import datetime
import platform
import statistics
import time

import torch

from ._ops import flash_attn_2_cuda
from ._version import __version__


def cpu_name():
    """Returns the processor's name, family and model as the system tells them.

    A virtual machine's name can say too little: "AMD EPYC" is Zen 3, Zen 4 or Zen 5.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
        name = found["model name"].replace("(R)", "").replace("(TM)", "")
    except (OSError, KeyError):
        return platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {found[key]}" for key in ("cpu family", "model") if key in found]
    return ", ".join([name, " ".join(numbers)] if numbers else [name])


def machine():
    """Returns one row that describes the machine of a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "isa": flash_attn_2_cuda.cpu_isas()[-1],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flash_attn": __version__,
    }


def alternate(functions, rounds):
    """Calls functions in turn, round after round. So a slow minute of the machine hits all functions alike.

    Each function is called once before the first round, without timing. Returns the seconds of each function in each
    round.
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


def quotient(baseline, ours):
    """Returns the quotient of two printed times. A reader who divides them gets the same."""
    return float(baseline) / float(ours)


def speedup(baseline, ours):
    """Returns how many times as fast we are: the median of the ratios over alternating rounds."""
    return statistics.median(a / b for a, b in zip(baseline, ours))
