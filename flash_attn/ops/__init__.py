"""Elementwise and normalisation operators that surround attention, in plain PyTorch."""
