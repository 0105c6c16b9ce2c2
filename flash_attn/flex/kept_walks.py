"""What calls on a GPU keep beside the lists of blocks for the next calls, and when they may keep anything."""

import sys

import torch

MOST_BYTES = 160 << 20  # that a block mask keeps of one pass: up to 36k queries and keys
FEW_BYTES = 4 << 20  # beside lists that nobody holds but us: up to 5.7k queries and keys


class KeptWalks(list):
    """What the kernels walk through, of the forward and of the backward, as the first call has found it.

    C fills it in (csrc/torch/kept_walks.h), if one takes no more than ``most_bytes``. A copy has nothing, because it
    belongs to other tensors.
    """

    def __init__(self, most_bytes=MOST_BYTES):
        super().__init__([None, None, most_bytes])

    def __deepcopy__(self, memo):
        return KeptWalks(self[2])

    def __reduce__(self):
        return KeptWalks, (self[2],)


def may_keep(device):
    """Does memory that is made now outlive the call? A CUDA graph takes back what was made while it was recorded.

    So does inductor after the run before a recording: whatever that run leaves behind is an error of its graph.
    """
    if device.type != "cuda":
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = None if trees is None else trees.get_manager(device.index, create_if_none_exists=False)
    return manager is None or not manager.in_warmup
