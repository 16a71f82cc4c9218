"""Pictures: their encoder, how ranks share it, and where their features go."""
