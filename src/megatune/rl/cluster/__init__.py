"""Ray: processes, devices, calls, and how failures are told."""
