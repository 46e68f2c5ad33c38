"""What `finetune_llama.py` is made of: the model, its checkpoints, LoRA, the data, and the training step."""
