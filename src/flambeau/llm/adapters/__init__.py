"""LoRA adapters: read from PEFT folders, applied to the rows of a step that ask for them, or merged on load."""
