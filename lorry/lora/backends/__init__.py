"""LoRA on linear layers: interchangeable backends behind one interface."""
