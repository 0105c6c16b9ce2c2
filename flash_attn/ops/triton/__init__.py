"""Operators under the names that clients import. They do not need Triton."""
