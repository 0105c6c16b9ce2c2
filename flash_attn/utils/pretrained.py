"""Weights of a pretrained model as one state dict, from a directory or, through transformers, from its hub."""

import json
from pathlib import Path
from typing import Optional, Union

import torch
from torch import Tensor

from flash_attn._types import Device

__all__ = ["state_dict_from_pretrained"]

# transformers writes these files. An index maps parameter names to files.
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def state_dict_from_pretrained(
    model_name: Union[str, Path], device: Device = None, dtype: Optional[torch.dtype] = None
) -> dict[str, Tensor]:
    """``{name: tensor}`` of a model.

    Args:
        model_name: a directory with safetensors or PyTorch weights, whole or in shards, or a name on the hub.
        device: the tensors' device, by default the CPU.
        dtype: the floating tensors' dtype, by default the stored dtype.
    Raises:
        EnvironmentError: no weights are found.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"weight": torch.ones(2)}, f"{folder}/pytorch_model.bin")
    ...     state_dict_from_pretrained(folder, dtype=torch.float16)
    {'weight': tensor([1., 1.], dtype=torch.float16)}
    """
    path = _find(model_name)
    paths = [path]
    if path.suffix == ".json":
        shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        paths = [_locate(model_name, shard) for shard in shards]
    state = {}
    for path in paths:
        state.update(_load(path))
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in state.items()}


def _find(model_name):
    for file in FILES:
        path = _locate(model_name, file)
        if path is not None:
            return path
    raise OSError(f"{model_name} has none of {', '.join(FILES)}")


def _locate(model_name, file):
    """Path of a model's file, or None."""
    if Path(model_name).is_dir():
        path = Path(model_name, file)
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    path = cached_file(model_name, file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _load(path):
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
