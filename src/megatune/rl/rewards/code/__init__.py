"""Programs that a model wrote, and what runs them."""
