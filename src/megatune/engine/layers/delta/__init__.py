"""Gated delta net: a mixer of tokens whose state has a fixed size (Gated Delta Networks, arXiv:2412.06464)."""
