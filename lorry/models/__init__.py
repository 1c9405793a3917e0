"""Models come from transformers; this package loads them, hooks attention and experts, and finds LoRA's sites."""
