"""Helpers that models and clients share."""
