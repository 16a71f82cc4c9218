"""Vision encoders, how ranks share their work, and where their features are inserted."""
