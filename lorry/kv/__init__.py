"""Paged key-value memory: which pages are free, which hold a known prefix, and the tensors themselves."""
