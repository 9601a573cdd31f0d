"""Applications that run on any trainer of the protocol: supervised fine-tuning, and GRPO."""
