"""Engines that sample responses, and how weights come to them."""
