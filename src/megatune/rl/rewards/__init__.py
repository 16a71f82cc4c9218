"""What scores responses."""
