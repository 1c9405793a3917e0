"""LoRA: adapter files, device memory, the per-step routing of rows to adapters, and the layers that apply them."""
