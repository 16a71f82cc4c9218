"""The operators of a model on one rank, each declared once with its bytes, its products and its traffic."""
