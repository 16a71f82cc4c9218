"""What benchmarks/soak.py is made of: a command that is typed, the faults that strike it, and what it has trained."""
