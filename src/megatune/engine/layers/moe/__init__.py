"""Mixture of experts: the router, dispatching tokens to experts and combining outputs, and the experts."""
