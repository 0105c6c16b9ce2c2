"""The kernels' sources compile without costly spills, and wgmma stays asynchronous. Its matrix descriptors
come from uniform registers. The test needs nvcc, but no GPU.

Every row of tiles.def is compiled once, with features that change from row to row, and every other one of Hopper's rows
for caches once more with a cache. Of the decode kernels and those before Hopper only one row for each head dimension is
compiled.
FLASH_ATTN_TEST_ALL_KERNELS=1 compiles every kernel for every architecture that takes it: thousands of kernels.
"""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import flash_attn_2_cuda
import pytest

CUDA = Path(__file__).resolve().parents[1] / "csrc" / "cuda"
NVCC = shutil.which("nvcc")
ARCHS = (80, 86, 89, 90, 100, 120)

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")

# Rows that came when others had their picks. They stand at the end, so that the others keep their features and GPUs.
LATER = re.compile(r"attn_fwd_sm90_bf16_d(128_q64kv128|192_q64kv96|256_q64kv64)")
# Families of which one row for each head dimension is compiled.
ALIKE = re.compile(r"(attn_(decode_sm[89]0|(fwd|bwd|bwd_dq)_sm80)_bf16_d\d+)_")
# Kernels of short sequences have three rows for each head dimension, of 16, 32 and 64 tokens. Every fourth row is
# compiled: another number of tokens for each head dimension but 80.
SHORT = re.compile(r"attn_(fwd|bwd)_short_")
# Whole keys came later, too. They have the text of other caches, but for their loads.
WHOLE = re.compile(r"attn_fwd_sm90_bf16_d(128_q128|256_q64)kv\d+_causal_cache_whole")


def variants():
    """(name, family, row, features, arch) of the kernels to compile."""
    everything = os.environ.get("FLASH_ATTN_TEST_ALL_KERNELS") == "1"
    rows = {}
    for name, family, row, features, arch in flash_attn_2_cuda.cuda_kernels():
        if everything:
            for own in [arch] if arch else ARCHS:
                if flash_attn_2_cuda.cuda_kernel_is_taken(family, row, features, own):
                    yield name, family, row, features, own
        elif "_fp16_" not in name:
            rows.setdefault((family, row), []).append((name, features, arch))
    later = {x: bool(LATER.search(kernels[0][0])) for x, kernels in rows.items()}
    seen = set()
    for i, ((family, row), kernels) in enumerate(sorted(rows.items(), key=lambda x: (later[x[0]], x[0]))):
        alike = ALIKE.match(kernels[0][0])
        if alike and alike[1] in seen:
            continue
        seen.add(alike and alike[1])
        is_short = bool(SHORT.match(kernels[0][0]))
        if is_short and row % 4:
            continue
        others = [x for x in kernels if "_whole" not in x[0]]
        chosen = others[(i * 7 + is_short * row // 4) % len(others)]
        cached = [x for x in kernels if x != chosen and x[0].endswith("_causal_cache") and i % 2]
        cached += [x for x in kernels if x != chosen and WHOLE.fullmatch(x[0])]
        for name, features, arch in (chosen, *cached):
            yield name, family, row, features, arch or ARCHS[i % len(ARCHS)]


# ptxas runs the products of these one by one, because registers run out. What this costs the backward was not measured.
# A forward of which two CTAs of 128 rows share an SM is faster all the same, because the other CTA computes meanwhile.
SERIALIZED = re.compile(
    r"attn_bwd_sm90_(bf16|fp16)_d128_q64kv128_local(_varlen)?_(score|dropout)|.*x2(_causal)?(_varlen)?"
)


def most_spilled(name, arch):
    """The largest allowed spill in bytes a thread. The warps that feed the backward have 24 registers and spill values
    that they read once a tile. The backward's many options together spill a little everywhere. Generic kernels of 256
    columns spill a few addresses. So do the warps beside the consumers of the forward in 8 bits. One generic forward of
    128 columns spills, too, most on 8.6. What this costs was not measured. The kernels before Hopper use all registers.
    The backward spills what it reads once a step, and was faster in measurements than with smaller tiles that do not
    spill. With dropout it spills most, up to 272 bytes in bf16 at 96 columns, and its speed with dropout was not
    measured. On 10.0 the one of 256 columns spills 172 bytes since masks became cheaper, which was not measured either.
    The forward spills outside of plain steps: up to 60 bytes at 192 columns, 80 at 80, 84 at 96, most with dropout, and
    140 in bf16 at 96 on 9.0, which has kernels of its own. In
    fp32 the generic forward spills 208 bytes at 128 columns on 8.6, 268 with the additions of flash-attn 3, and 272 at
    256 with these on 9.0. The backward of short sequences spills up to 16 bytes at 64 columns and 64 rows with options.
    Packed short sequences spill up to 20 with dropout, and 12 at 160 columns on 10.0 with options of the scores.
    Hopper's forward of few rows of 256 columns over a cache spills 36 with a window and options of the scores. What
    they cost was not measured either."""
    if name == "attn_fwd_sm90_bf16_d256_q64kv64_local_score_cache":
        return 36
    if re.match("attn_(fwd|bwd)_short_.*_varlen.*_dropout", name):
        return 20
    if re.match("attn_fwd_short_.*_d160_.*_varlen_score$", name) and arch == 100:
        return 12
    if name.startswith("attn_bwd_short_bf16_d64_q64kv64_"):
        return 16
    if name.startswith("attn_fwd_any_fp32_d128_q128kv32"):
        return 272 if "_of3" in name else 208
    if name == "attn_fwd_any_fp32_d256_q64kv16_of3":
        return 272
    if name == "attn_fwd_any_bf16_d128_q128kv64_of3":
        return 136
    if name == "attn_fwd_sm80_bf16_d96_q128kv64s2_score_dropout" and arch == 90:
        return 140
    if name.startswith("attn_fwd_sm80_"):
        return 96 if "_d96_" in name else 80
    if name == "attn_bwd_sm80_bf16_d256_q64kv64w8g2" and arch == 100:
        return 172
    if name.startswith("attn_bwd_sm80_"):
        return {0: 160, 1: 272, 2: 700}[len(re.findall("score|dropout", name))]
    if name.startswith("attn_bwd_") and "sm90" in name:
        return 500 if re.search("score|dropout", name) else 240 if "alibi" in name else 200
    if name.startswith("attn_fwd_fp8_"):
        return 128
    return 128 if "any" in name and "_d256_" in name else 0


def opcodes_of(cubin):
    """The opcode of each instruction of a Hopper kernel. An instruction has 16 bytes, and its first 12 bits are the
    opcode."""
    begin, (size, num, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, begin + i * size) for i in range(num)]
    for name, _, _, _, offset, length in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            yield from (word & 0xFFF for word, _ in struct.iter_unpack("<QQ", cubin[offset : offset + length]))


# HGMMA and QGMMA with A in shared memory or in registers; a move to a uniform register
PRODUCTS, TO_UNIFORM = {0x9F0, 0xDF0, 0x9F3, 0xDF3}, 0x2CA


def moves_of_longest_run(opcodes):
    """How many moves stand in the longest run of products, which is the loop's. ptxas adds two moves to each product
    whose descriptor it takes for a value that differs between threads. Such a kernel took up to 13% longer."""
    NEAR = 60
    runs, moves, distance = [], 0, NEAR
    for opcode in opcodes:
        distance += 1
        moves += opcode == TO_UNIFORM
        if opcode in PRODUCTS:
            if distance >= NEAR:
                runs.append([0, 0])
                moves = 0
            runs[-1][0] += 1
            runs[-1][1] += moves
            distance = moves = 0
    return max(runs)[1] if runs else 0


@pytest.mark.parametrize("variant", list(variants()), ids=lambda variant: f"{variant[0]}-sm_{variant[-1]}")
def test_kernel_compiles_clean(variant, tmp_path):
    file, options = flash_attn_2_cuda.cuda_kernel_source(*variant[1:])
    options = [option.replace("--gpu-architecture=", "-arch=") for option in options]
    command = [NVCC, "-cubin", "-Xptxas=-v", *options, CUDA / file, "-o", tmp_path / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "warning" not in log and bool(re.search(r"\(C75\d\d\)", log)) == bool(SERIALIZED.fullmatch(variant[0])), log
    spilled = [int(stores) for stores in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= most_spilled(variant[0], variant[-1]), log
    if variant[-1] == 90:
        opcodes = list(opcodes_of((tmp_path / "kernel.cubin").read_bytes()))
        assert bool(PRODUCTS & set(opcodes)) == bool(re.match("attn_(fwd|bwd)_.*sm90", variant[0])), (
            "opcodes are unknown"
        )
        assert moves_of_longest_run(opcodes) <= 4
