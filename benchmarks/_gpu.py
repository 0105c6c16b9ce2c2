"""The parts that all benchmarks on a GPU share: problems, the two rules of timing, and the files of results.

A problem has 16k tokens and a hidden size of 2048. For head_dim d there are 2048 / d heads, and for length s 16k / s
sequences. The packed problem has 24 sequences of 64 .. 4096 tokens, 54,368 tokens in all. Beside it stands a dense
batch that fills its tiles. This batch has 21 sequences of 2688, which is 3.8% more tokens and as many operations (0.04%
fewer). Input is N(0, 1) in bf16. TFLOPS count the operations of the formula, half of them when causal.

Timing has these rules, and each writes a file of its own:

    turns      The kernels of a problem run launch by launch, in a random order in every turn, with the L2 flushed
               before each launch. A figure is the median over as many turns as fill --seconds, after a tenth of them as
               warm-up. All kernels of a problem see the same clock. Fast kernels profit from the pauses that slow
               kernels and flushes give the board.
    sustained  One kernel runs alone, back to back for --sustained-seconds, without a flush. Before that it runs for a
               fifth of the time, uncounted. All kernels of a problem do so in random order, --sustained-runs times;
               each run is a row. A training job sees these figures, because the board's power lowers the clock.
    added      What a call adds to a stream. Ten flushes of the L2 run with the call between them, and ten without, in
               random order. A figure is the difference. It is for calls of few microseconds. With the rule "turns", an
               event lies between the flush and the call, so no kernel is launched before the flush has ended. In a
               model such early launches save time (programmatic dependent launch).

NVML gives the SM clock (the median of samples) and the board's watts (energy divided by time). It needs the package
nvidia-ml-py. Without the package, or where NVML does not answer, these columns are empty and a line gives the reason.
"""

import datetime
import random
import threading
import time
from statistics import median

import flash_attn_2_cuda
import torch
from _results import add_out, command, need_gpu, save
from cases import BENCH_GPU
from tables import print_tables

TOKENS, HIDDEN = BENCH_GPU[0].b * BENCH_GPU[0].len_q, BENCH_GPU[0].h * BENCH_GPU[0].d
LENGTHS = torch.randint(64, 4097, (24,), generator=torch.Generator().manual_seed(0))
EQUAL = 21, 2688  # sequences, length
COLUMNS = ["date", "device", "torch", "cudnn", "rule", "kernel", "d", "b", "h", "length", "causal", "run"]
COLUMNS += ["ms", "tflops", "mhz", "watts", "mib", "command"]
KEY = ["device", "kernel", "d", "b", "h", "length", "causal", "run"]
RULES = ["turns", "sustained"]


def device_name():
    return torch.cuda.get_device_name().replace(" ", "_")


def add_options(parser, kernels, default, dims=None, seconds=0.4):
    dims = dims or list(dict.fromkeys(case.d for case in BENCH_GPU))
    lengths = list(dict.fromkeys(case.len_q for case in BENCH_GPU))
    parser.add_argument("--dims", type=int, nargs="+", default=dims)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--kernels", nargs="+", default=default, choices=kernels, help="unless packed")
    parser.add_argument(
        "--packed", action="store_true", help="packed sequences beside dense ones of as many operations"
    )
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES, help="how to time (default: both)")
    parser.add_argument("--seconds", type=float, default=seconds, help="in turns: all kernels of a problem together")
    parser.add_argument("--sustained-seconds", type=float, default=1.0, help="of each run of a kernel alone")
    parser.add_argument("--sustained-runs", type=int, default=2, help="of each kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the random orders")
    add_out(parser)


def problems(options):
    """(d, heads, causal, length or "packed") in the order of the table."""
    for d in options.dims:
        for causal in (False, True):
            for length in ["packed"] if options.packed else options.lengths:
                yield d, HIDDEN // d, causal, length


def offsets(lengths=LENGTHS):
    """cu_seqlens of a packed problem."""
    return torch.nn.functional.pad(torch.as_tensor(lengths).cumsum(0), (1, 0)).to("cuda", torch.int32)


def compiled_flex():
    """FlexAttention for one problem. In one process torch would compile at most eight of nine kinds of tensors."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def area(length, b):
    """Scores of one head in all sequences."""
    return int((LENGTHS**2).sum()) if length == "packed" else b * length**2


class Meter:
    """Samples this GPU's energy counter and SM clock in a thread while the context is open."""

    interval = 0.02
    _said = False

    def __init__(self):
        self.samples, self.device = [], None
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml = pynvml
            self.device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        except Exception as error:  # NVML raises a different class for each missing part
            self.say(error)

    @classmethod
    def say(cls, error):
        if not cls._said:
            print(f"  no SM clock or no watts: {error}")
        cls._said = True

    def _ask(self, function, *args):
        try:
            return function(self.device, *args)
        except self.nvml.NVMLError as error:
            self.say(error)

    def _sample(self):
        while not self.ended.wait(self.interval):
            joules = self._ask(self.nvml.nvmlDeviceGetTotalEnergyConsumption)
            mhz = self._ask(self.nvml.nvmlDeviceGetClockInfo, self.nvml.NVML_CLOCK_SM)
            self.samples.append((time.monotonic(), joules and joules / 1000, mhz))

    def __enter__(self):
        if self.device is not None:
            self.ended = threading.Event()
            self.thread = threading.Thread(target=self._sample, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_):
        if self.device is not None:
            self.ended.set()
            self.thread.join()

    def between(self, begin, end):
        """{"mhz", "watts"} of the samples in these seconds of time.monotonic(). Unknown values are None."""
        samples = [sample for sample in self.samples if begin <= sample[0] <= end]
        clocks = [mhz for _, _, mhz in samples if mhz]
        # The counter steps several times a second. Between two steps its slope is exact.
        steps = [(at, now) for (_, before, _), (at, now, _) in zip(samples, samples[1:]) if now and now != before]
        found = {"mhz": round(median(clocks)) if clocks else None, "watts": None}
        if len(steps) > 1:
            found["watts"] = round((steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0]))
        return found


def flusher(by="write", num_bytes=256 << 20):
    """A function that takes everything else out of the L2. Lines that it wrote go to memory before others take their
    place. Lines that it read do not, like the weights of a model."""
    memory = torch.zeros(num_bytes // 4, dtype=torch.int32, device="cuda")
    return memory.zero_ if by == "write" else memory.max


def launch(fn, flush):
    """The events around one launch, which comes behind flush()."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    begin.record()
    fn()
    end.record()
    return begin, end


def ready(kernels):
    """{name: call} of the kernels that take the problem."""
    calls = {}
    for name, make in kernels.items():
        try:
            calls[name] = make()
            calls[name]()
        except (RuntimeError, TypeError, ImportError) as error:
            calls.pop(name, None)
            print(f"  {name}: {str(error).splitlines()[0]}")
    return calls


def by_kernels(words, call):
    """The call with these words in place of FLASH_ATTN_CUDA_KERNEL."""

    def chosen():
        flash_attn_2_cuda.set_cuda_kernels(words)
        try:
            return call()
        finally:
            flash_attn_2_cuda.set_cuda_kernels(None)

    return chosen


def shuffled(items, rng):
    items = list(items)
    rng.shuffle(items)
    return items


def stream(call, flush, times=10):
    """The events around `times` calls, each followed by a flush. call: None for flushes alone."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(8):  # The host gets ahead of the GPU.
        flush()
    begin.record()
    for _ in range(times):
        if call:
            call()
        flush()
    end.record()
    return begin, end


def added(calls, seconds, flush, rng, times=10):
    """({name: milliseconds}, MHz) by the rule "added". Less than a tenth of a microsecond counts as that."""
    streams = {None: None, **calls}

    def turn():
        return {name: stream(call, flush, times) for name, call in shuffled(streams.items(), rng)}

    start = time.monotonic()
    turn()
    torch.cuda.synchronize()
    turns = max(5, int(seconds / (time.monotonic() - start)))
    with Meter() as meter:
        start = time.monotonic()
        found = [turn() for _ in range(turns)]
        torch.cuda.synchronize()
    mhz = meter.between(start, time.monotonic())["mhz"]
    ms = {name: median(pairs[name][0].elapsed_time(pairs[name][1]) for pairs in found) / times for name in streams}
    return {name: max(ms[name] - ms[None], 1e-4) for name in calls}, mhz


def in_turns(calls, seconds, flush, rng):
    """({name: milliseconds}, MHz) by the rule "turns"."""
    pairs = [launch(call, flush) for call in calls.values() for _ in range(3)]
    torch.cuda.synchronize()
    turns = max(5, int(seconds * 1000 / (sum(begin.elapsed_time(end) for begin, end in pairs) / 3)))
    pairs = {name: [] for name in calls}
    with Meter() as meter:
        start = time.monotonic()
        for turn in range(-max(1, turns // 10), turns):
            for name, call in shuffled(calls.items(), rng):
                pair = launch(call, flush)
                if turn >= 0:
                    pairs[name].append(pair)
        torch.cuda.synchronize()
    mhz = meter.between(start, time.monotonic())["mhz"]
    return {name: median(begin.elapsed_time(end) for begin, end in found) for name, found in pairs.items()}, mhz


def alone(call, seconds):
    """{"ms", "mhz", "watts"} by the rule "sustained"."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        call()
    end.record()
    end.synchronize()
    times = max(3, int(seconds * 1000 / (begin.elapsed_time(end) / 3)))
    with Meter() as meter:
        for _ in range(times // 5):
            call()
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        now = time.monotonic()
    elapsed = begin.elapsed_time(end)
    return {"ms": elapsed / times, **meter.between(now - elapsed / 1000, now)}


def peak_memory(fn):
    """MiB that a call needs beyond the memory in use before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def machine():
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def measure(options, calls, flush, rng):
    """(rule, kernel, {"run", "ms", "mhz", "watts"}) of every kernel by every rule that the options ask for."""
    if "turns" in options.rules:
        times, mhz = in_turns(calls, options.seconds, flush, rng)
        for name, ms in times.items():
            yield "turns", name, {"ms": ms, "mhz": mhz}
    for run in range(options.sustained_runs if "sustained" in options.rules else 0):
        for name, call in shuffled(calls.items(), rng):
            yield "sustained", name, {"run": run, **alone(call, options.sustained_seconds)}


def main(options, stem, kernels_of, per_score):
    """Measures every problem, writes the rows of each rule as they come, prints the tables.

    kernels_of(d, h, causal, length): {name: (b, length, function that returns a call without arguments)}.
    per_score: operations for each score and column of a head.
    """
    need_gpu()
    base, rng = {**machine(), "command": command()}, random.Random(options.seed)
    suffix = "_packed" if options.packed else ""
    paths = {
        rule: options.out / f"{stem}{'_sustained' if rule == 'sustained' else ''}_{base['device']}{suffix}.csv"
        for rule in options.rules
    }
    print(f"{base['device']}, torch {base['torch']}, cuDNN {base['cudnn']}: TFLOPS, MHz, watts", flush=True)
    flush = flusher()
    for d, h, causal, length in problems(options):
        kernels = kernels_of(d, h, causal, length)
        calls = ready({name: make for name, (_, _, make) in kernels.items()})
        mib = {name: round(peak_memory(call)) for name, call in calls.items()}
        rows = {rule: [] for rule in options.rules}
        for rule, name, found in measure(options, calls, flush, rng):
            b, own_length, _ = kernels[name]
            tflops = per_score * h * d * area(own_length, b) * (0.5 if causal else 1) / found["ms"] / 1e9
            row = {
                **base,
                "rule": rule,
                "kernel": name,
                "d": d,
                "b": b,
                "h": h,
                "length": own_length,
                "causal": causal,
                **found,
            }
            row.update(ms=round(found["ms"], 4), tflops=round(tflops, 1), mib=mib[name])
            rows[rule].append(row)
        for rule in options.rules:
            save(rows[rule], paths[rule], COLUMNS, KEY)
            figures = [f"{r['kernel']} {r['tflops']:.0f} {r['mhz']} {r.get('watts') or ''}" for r in rows[rule]]
            where = f"d {d:3}  length {length:>6}  {'causal' if causal else 'full  '}"
            print(f"{where}  {rule:9}  {'  '.join(figures)}", flush=True)
        del kernels, calls
    print_tables(options.out, base["device"])
