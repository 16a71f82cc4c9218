"""The operators of a model on one rank, each declared once with its memory, products and memory traffic."""
