"""Mixture of experts: the router, how tokens reach their experts and come back, and the experts."""
