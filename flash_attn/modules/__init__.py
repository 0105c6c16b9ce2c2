"""Transformer modules on top of the attention functions."""
