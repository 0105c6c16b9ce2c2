"""The machine code of the CPU engine's inner loops. A kernel that spills accumulators runs at half speed. A kernel
whose compiler folds a shared load into every multiply-add runs at three quarters. The source shows neither."""

import re

import pytest
from object_cache import cached
from toolbox import C_FLAGS, CSRC, arm_compiler, compile_object, run, tool

MULTIPLY_ADD = re.compile(r"vfn?m(add|sub)\d+ps|vdpbf16ps")
PRODUCTS = ["product_scores", "product_scores_max", "product_add", "product_rescale"]
# instruction set: multiply-adds in a step of the widest register block (rows x vectors), and its loads (rows + vectors)
PATCH = {"avx2": (12, 7), "avx512": (16, 8), "avx512bf16": (16, 8)}


def functions(text):
    """The instructions of every function, as (address, mnemonic, operands)."""
    found, body = {}, None
    for line in text.splitlines():
        header = re.match(r"[0-9a-f]+ <(\S+)>:", line)
        instruction = re.match(r"\s+([0-9a-f]+):\s+(\S+)\s*(.*)", line)
        if header:
            body = found.setdefault(header[1].split(".")[0], [])
        elif instruction and body is not None:
            body.append((int(instruction[1], 16), instruction[2], instruction[3]))
    return found


def innermost_loops(body, jump=r"j.*", operand=r"([0-9a-f]+)\b"):
    """The code from the target of a backward jump to the jump, if no other such jump lies between."""
    addresses = {address: n for n, (address, _, _) in enumerate(body)}
    spans = []
    for n, (address, mnemonic, operands) in enumerate(body):
        target = re.match(operand, operands)
        if not target or not re.fullmatch(jump, mnemonic):
            continue
        if int(target[1], 16) <= address and int(target[1], 16) in addresses:
            spans.append((addresses[int(target[1], 16)], n))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [body[a : b + 1] for a, b in inner]


def multiply_adds(loop):
    return [operands for _, mnemonic, operands in loop if MULTIPLY_ADD.fullmatch(mnemonic)]


def broadcasts(loop):
    """Only loops over k broadcast words. Loops that rescale rows also have multiply-adds."""
    return any("broadcast" in mnemonic or "{1to" in operands for _, mnemonic, operands in loop)


def spills(loop):
    """Vectors that are stored or come from the stack. A loop of products needs neither."""
    vectors = [operands for _, _, operands in loop if re.search(r"%[xyz]mm", operands)]
    return [operands for operands in vectors if re.search(r"%[xyz]mm\d+,.*\(", operands) or "(%rsp" in operands]


def folded(loop):
    """Vectors loaded inside multiply-adds, although every row of the register block needs them."""
    return [operands for operands in multiply_adds(loop) if "(" in operands and "{1to" not in operands]


def loads(loop):
    return [operands for _, _, operands in loop if "(" in operands and re.search(r"%[xyz]mm", operands)]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("unit", PATCH)
def test_products_keep_their_registers(unit, compiler, tmp_path):
    object_file = tmp_path / "out.o"
    compile_object(compiler, CSRC / "cpu" / f"attn_{unit}.c", object_file)
    code = functions(run(tool("objdump"), "-d", "--no-show-raw-insn", object_file))
    for name in PRODUCTS:
        loops = [loop for loop in innermost_loops(code[name]) if broadcasts(loop) and len(multiply_adds(loop)) >= 4]
        steps, step_loads = PATCH[unit]
        assert any(len(multiply_adds(loop)) * step_loads == len(loads(loop)) * steps for loop in loops), (
            f"{name}: no loop has the {steps} multiply-adds of the widest patch for {step_loads} loads"
        )
        for loop in loops:
            assert spills(loop) == [], f"{name}: registers went to memory in a loop"
            assert folded(loop) == [], f"{name}: a load is repeated inside of multiply-adds"


# ---- 64-bit ARM -----------------------------------------------------------------------------------------------------

# A step takes 4 words of each row. A register block has 4 rows x 4 vectors or 8 rows x 2 vectors, so a step loads 4
# vectors of A and 16 of B, or 8 and 8.
ARM_STEP, ARM_LOADS = 64, (4 + 16, 8 + 8)
ARM_UNITS = {"neon": "fmla", "neonbf16": "bfdot"}
ARM_JUMP, ARM_TARGET = r"b|b\..*|cbn?z|tbn?z", r"(?:[^<]*, )?([0-9a-f]+) <"


def vectors_loaded(loop):
    loads = [operands for _, mnemonic, operands in loop if mnemonic in ("ldr", "ldur", "ldp")]
    return sum(len(re.findall(r"\bq\d+", operands)) for operands in loads)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("unit", ARM_UNITS)
def test_products_on_arm_take_words_from_lanes(unit, compiler, tmp_path):
    """A step consists of loads and multiply-adds. No accumulator is stored or copied, and no word is broadcast."""
    object_file = tmp_path / "out.o"
    target = ["-march=armv8.2-a+bf16"] if compiler == "clang" and unit == "neonbf16" else []  # for clang before 16
    program, *options = arm_compiler(compiler)
    source = CSRC / "cpu" / f"attn_{unit}.c"
    run(*cached(program), *options, *target, *C_FLAGS, "-fPIC", "-c", source, "-o", object_file)
    code = functions(run(tool("aarch64-linux-gnu-objdump"), "-d", "--no-show-raw-insn", object_file))
    for name in PRODUCTS:
        steps = 0
        for loop in innermost_loops(code[name], ARM_JUMP, ARM_TARGET):
            sums = [operands for _, mnemonic, operands in loop if mnemonic == ARM_UNITS[unit]]
            if len(sums) != ARM_STEP or not all(re.search(r"\[\d\]$", operands) for operands in sums):
                continue
            steps += 1
            vectors = [(mnemonic, operands) for _, mnemonic, operands in loop if re.search(r"\b[vq]\d+", operands)]
            known = (ARM_UNITS[unit], "ldr", "ldur", "ldp")
            others = [words for words in vectors if words[0] not in known or "[sp" in words[1]]
            assert others == [], f"{name}: vectors are copied, broadcast, stored or come from the stack in a loop"
            assert vectors_loaded(loop) in ARM_LOADS, f"{name}: a load is repeated"
        assert steps > 0, f"{name}: no loop has the {ARM_STEP} multiply-adds of a step"
