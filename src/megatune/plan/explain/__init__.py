"""What settings are, how they work, when to change them, and what they cost for a model on its machines."""
