"""Attention over the paged KV pool: one interface, planned once per step and run once per layer."""
