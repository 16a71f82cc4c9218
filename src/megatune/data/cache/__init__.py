"""Prepared rows between runs: what determines them, and the folders that keep them."""
