"""Runs one function on several ranks of a gloo group, each in a process of its own."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(function, tmp_path, world_size=2, backend="gloo"):
    """Runs ``function(rank, group)`` on every rank. An exception on any rank fails the test. The function must be
    importable. With backend "nccl" each rank has a GPU."""
    # Imported once for all ranks, and in this order: the ops then take distributed tensors from the start.
    mp.get_context("forkserver").set_forkserver_preload(["torch.distributed.tensor", "flash_attn"])
    args = function, world_size, str(tmp_path / "rendezvous"), backend
    mp.start_processes(_rank, args=args, nprocs=world_size, start_method="forkserver")


def _rank(rank, function, world_size, file, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world_size)
    try:
        function(rank, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
