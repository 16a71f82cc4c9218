"""Ray: processes, devices, calls, and failure reports."""
