"""Load and save Hugging Face safetensors as tensors of the engine, streamed: no conversion step, little memory."""
