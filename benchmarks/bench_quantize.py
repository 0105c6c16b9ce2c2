"""quantize of flash_attn_3: its speed on a GPU beside a copy, and the accuracy of FP8 attention on the CPU.

    python benchmarks/bench_quantize.py --accuracy    relative errors of attention in bf16 and FP8, on the CPU
    python benchmarks/bench_quantize.py               speed, on a GPU

Speed counts the bytes that HBM must move: each element is read once and written as one byte. The copy reads and writes
as many bytes as the largest problem. A figure is the median of --repeats launches.

Accuracy is |out - truth| / |truth| over all elements, with Frobenius norms. The truth is attention of the same bf16
inputs in fp64. Inputs are N(0, 1), and N(0, 1) where 0.1% of the entries of q, k and v are multiplied by 50.

"""

import argparse
import datetime
import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch
from _gpu import flusher
from _results import add_out, command, need_gpu, save
from cases import BENCH_QUANTIZE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hopper"))

from flash_attn_3.flash_attn_interface import flash_attn_func, quantize

ACCURACY = ["date", "device", "torch", "data", "d", "length", "causal", "method", "relative_error", "command"]
SPEED = ["date", "device", "torch", "dtype", "b", "length", "h", "h_kv", "d", "per", "hadamard", "us", "gb_per_s"]
SPEED += ["share_of_copy", "command"]


def row(**values):
    return {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "command": command(), **values}


# ---- accuracy ----------------------------------------------------------------------------------------------------

METHODS = {
    "bf16": None,
    "fp8, one descale a tensor": {"per": "tensor"},
    "fp8, a descale a head": {"per": "head"},
    "fp8, a descale a head, hadamard": {"per": "head", "hadamard": True},
}


def make(data, length, h, d, generator):
    tensors = [torch.randn(1, length, h, d, generator=generator) for _ in range(3)]
    if data == "outliers":
        tensors = [torch.where(torch.rand(x.shape, generator=generator) < 1e-3, 50 * x, x) for x in tensors]
    return [x.bfloat16() for x in tensors]


def attend(tensors, method, causal):
    if METHODS[method] is None:
        return flash_attn_func(*tensors, causal=causal)
    q, k, v, q_descale, k_descale, v_descale = quantize(*tensors, **METHODS[method])
    return flash_attn_func(q, k, v, causal=causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def accuracy(options):
    rows = []
    for data in ("normal", "outliers"):
        for d in options.dims:
            generator = torch.Generator().manual_seed(0)
            tensors = make(data, options.length, options.heads, d, generator)
            for causal in (False, True):
                truth = flash_attn_func(*[x.double() for x in tensors], causal=causal)
                for method in METHODS:
                    error = (attend(tensors, method, causal).double() - truth).norm() / truth.norm()
                    rows.append(
                        row(
                            device="CPU",
                            data=data,
                            d=d,
                            length=options.length,
                            causal=int(causal),
                            method=method,
                            relative_error=f"{error:.2e}",
                        )
                    )
                    print(*(rows[-1][name] for name in ACCURACY[3:-1]), sep=", ", flush=True)
    save(rows, options.out / "fp8_accuracy.csv", ACCURACY, ["data", "d", "length", "causal", "method"])


# ---- speed -------------------------------------------------------------------------------------------------------


def microseconds(function, repeats):
    """The median time of a launch. A fill of 256 MB before each launch empties the L2."""
    flush = flusher()
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return median(times[3:])


def copy_rate(num_bytes, repeats):
    source, target = torch.empty(2, num_bytes // 2, dtype=torch.uint8, device="cuda")
    return num_bytes / microseconds(lambda: target.copy_(source), repeats) / 1000


def speed(options):
    need_gpu()
    device = torch.cuda.get_device_name().replace(" ", "_")
    copy = copy_rate(320 << 20, options.repeats)
    print(f"copy: {copy:.0f} GB/s")
    rows = []
    for case in BENCH_QUANTIZE:
        b, length, h, h_kv, d = case.b, case.len_q, case.h, case.h_kv, case.d
        tensors = [torch.randn(b, length, heads, d, device="cuda").bfloat16() for heads in (h, h_kv, h_kv)]
        num_bytes = 3 * sum(x.numel() for x in tensors)
        for per, hadamard in (("head", False), ("head", True), ("tensor", False)):
            us = microseconds(partial(quantize, *tensors, per=per, hadamard=hadamard), options.repeats)
            rate = num_bytes / us / 1000
            sizes = {"dtype": "bf16", "b": b, "length": length, "h": h, "h_kv": h_kv, "d": d}
            rows.append(
                row(
                    device=device,
                    **sizes,
                    per=per,
                    hadamard=int(hadamard),
                    us=f"{us:.1f}",
                    gb_per_s=f"{rate:.0f}",
                    share_of_copy=f"{rate / copy:.2f}",
                )
            )
            print(*(rows[-1][name] for name in SPEED[3:-1]), sep=", ", flush=True)
    key = ["device", "dtype", "b", "length", "h", "h_kv", "d", "per", "hadamard"]
    save(rows, options.out / f"quantize_{device}.csv", SPEED, key)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", action="store_true", help="relative errors on the CPU instead of speed")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256], help="of the accuracy")
    parser.add_argument("--length", type=int, default=1024, help="of the accuracy")
    parser.add_argument("--heads", type=int, default=4, help="of the accuracy")
    parser.add_argument("--repeats", type=int, default=30, help="of each launch")
    add_out(parser)
    options = parser.parse_args()
    accuracy(options) if options.accuracy else speed(options)


if __name__ == "__main__":
    main()
