"""Operators under the names by which clients import them; nothing here needs Triton."""
