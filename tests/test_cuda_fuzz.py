"""Random problems (hypothesis) on a GPU, forward and backward, on the kernels that the plan chooses.

Nearly every problem needs kernels of its own, which take seconds to compile at first. So run the tests in parallel
(pytest -n 5). A failure prints the line that replays the failure:

python tests/test_cuda_fuzz.py "Case(len_q=65, len_kv=1, d=64, dtype='bf16', causal=True)"
"""

import sys
from dataclasses import replace

import fuzz
import pytest
from cases import BOTH, Case
from harness_cuda import no_gpu, verify
from harness_fuzz import EXAMPLES, SETTINGS, problems
from hypothesis import given, note, settings

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


def replay(case, deterministic):
    try:
        verify(case, backward=True, deterministic=deterministic)
    except Exception as error:
        note(f'replay: python tests/test_cuda_fuzz.py "{case}"   # deterministic={deterministic}: {error}')
        raise


@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@settings(SETTINGS, max_examples=EXAMPLES or 30)
@given(problems())
def test_what_hopper_takes(dtype, deterministic, case):
    """Head sizes of whole 16-byte pieces. On other GPUs the generic kernels serve these cases, too."""
    replay(replace(case, dtype=dtype, d=(case.d + 7) // 8 * 8), deterministic)


@SETTINGS
@given(problems())
def test_anything(case):
    replay(case, False)


@pytest.mark.parametrize("part", range(8))
def test_small_problems(part):
    """Infinities that rows see, sizes of zero, and memory of NaN (fuzz.py)."""
    num = (EXAMPLES or 400) // 8
    assert fuzz.run_range(fuzz.run_on_cuda, part * num, (part + 1) * num, bytearray(8)), "the cases that are printed"


if __name__ == "__main__":
    for text in sys.argv[1:]:
        for order in BOTH:
            replay(eval(text, {"Case": Case}), order)
        print("passed:", text)
