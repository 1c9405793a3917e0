"""LoRA on the experts of a mixture-of-experts layer, together with the experts' own product."""
